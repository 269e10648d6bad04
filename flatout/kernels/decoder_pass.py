"""A whole decoder in one native call: every layer of a pass over a few tokens (native_sources/decoder.cpp).

The C structures and the call; infer/generation/native_decoder.py fills them.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from flatout.kernels.native import library_or_error
from flatout.kernels.panels import WeightStruct, pointer, pointers, whole_numbers

NORMS = {"layer": 0, "rms": 1}
ACTIVATIONS = {"gelu": 0, "gelu_tanh": 1, "silu": 2, "relu": 3}


class LayerStruct(ctypes.Structure):
    """`Layer` of decoder.cpp."""

    _fields_ = (
        *pointers("norm1 norm1_bias norm2 norm2_bias query_norm key_norm"),
        *((name, WeightStruct) for name in ("qkv", "out", "up", "gate", "down")),
        *whole_numbers("window"),
        *pointers("keys values"),
    )


class DecoderStruct(ctypes.Structure):
    """`Decoder` of decoder.cpp."""

    _fields_ = (
        *whole_numbers("width heads kv_heads head_width inner layers vocabulary"),
        *whole_numbers("norm activation rotary_width cache_is_bf16 cache_length"),
        ("norm_epsilon", ctypes.c_float),
        ("attention_scale", ctypes.c_float),
        *pointers("cosines sines layer last_norm last_norm_bias"),
        ("head", WeightStruct),
    )


class _PassStruct(ctypes.Structure):
    """`Pass` of decoder.cpp."""

    _fields_ = (*whole_numbers("rows logit_rows threads"), *pointers("x slots positions logits_of logits"))


def run_pass(
    decoder: DecoderStruct, x: Tensor, slots: Tensor, positions: Tensor, logits_of: Tensor, threads: int
) -> Tensor:
    """One pass over the rows of x, fp32 [rows, width], which it changes -> logits fp32 [len(logits_of), vocabulary].

    slots, positions, logits_of: int64. Rows of one slot stand together, in the order of their positions. Nothing is
    checked here: a slot or position outside of the cache writes into foreign memory.
    """
    logits = torch.empty(len(logits_of), decoder.vocabulary, dtype=torch.float32, device="cpu")
    numbers = (x.shape[0], len(logits_of), threads)
    this = _PassStruct(*numbers, *(pointer(one) for one in (x, slots, positions, logits_of, logits)))
    library_or_error().flatout_decoder_pass(ctypes.byref(decoder), ctypes.byref(this))
    return logits
