"""Runs a decoder on the CPU by the native kernel: all layers of a pass in one call, the weights read once.

Sums, norms, softmax and what flows between blocks are fp32 in every precision; the weights are held, and the products
made, in fp32, bf16, int8 or int4.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flatout.infer.generation.cache import KeyValueCache
from flatout.infer.generation.decoder import Block, Decoder, Linear
from flatout.infer.generation.span import Span
from flatout.infer.generation.storage import Storage, storage_of_head
from flatout.kernels.decoder_pass import ACTIVATIONS, NORMS, DecoderStruct, LayerStruct, run_pass
from flatout.kernels.panels import Panels, WeightStruct, pack_dense, pack_int4, pack_int8, pointer
from flatout.precision.quantize import INT4_GROUP, quantize_groups_int4, quantize_rows_int8

ROWS_PER_PASS = 128
"""A longer prompt goes through in parts: the inputs of one stay in the processor's caches."""

BYTES_PER_THREAD = 2**20
"""Of weights, below which a further thread costs more than it brings."""


class NativeDecoder:
    """A decoder and its cache, ready to be advanced."""

    name = "native kernel"

    def __init__(self, decoder: Decoder, *, storage: Storage, threads: int | None = None) -> None:
        self.decoder, self.storage = decoder, storage
        self.device = torch.device("cpu")
        self.cache: KeyValueCache | None = None
        self._threads = threads
        self._kept: list[Any] = []
        """What C points into."""
        self.weight_bytes = 0
        """Read in every pass: the matrices with their scales."""
        self._tokens = decoder.tokens.detach()
        self._positions = None if decoder.positions is None else decoder.positions.detach()
        self._layers = (LayerStruct * len(decoder.blocks))(*(self._layer(block) for block in decoder.blocks))
        self._struct = self._fill()

    def open(self, cache: KeyValueCache) -> None:
        """Work on this cache from now on."""
        self.cache = cache
        for index, layer in enumerate(self._layers):
            keys, values = cache.tensors(index)
            layer.keys, layer.values = keys.data_ptr(), values.data_ptr()
        self._struct.cache_is_bf16 = int(cache.dtype == torch.bfloat16)
        self._struct.cache_length = cache.length

    def advance(self, tokens: Tensor, spans: Sequence[Span], *, every: bool = False) -> Tensor:
        """Read tokens, int64 [sum of the spans' lengths], and put their keys and values into the cache.

        Returns logits, fp32: of each span's last token [spans, vocabulary], or of every token [tokens, vocabulary].
        """
        assert self.cache is not None, "no cache was opened"
        for span in spans:  # the kernel writes where it is told
            self.cache.check(span)
        threads = self._threads_for(len(tokens))
        slots = torch.tensor([span.slot for span in spans for _ in range(span.length)])
        positions = torch.tensor([place for span in spans for place in range(span.start, span.start + span.length)])
        ends = torch.tensor([span.length for span in spans]).cumsum(0) - 1
        wanted = list(range(len(positions))) if every else ends.tolist()
        x = F.embedding(tokens, self._tokens).float()
        if self._positions is not None:
            x = x + F.embedding(positions, self._positions)
        parts = []
        for begin in range(0, len(positions), ROWS_PER_PASS):
            rows = slice(begin, begin + ROWS_PER_PASS)
            here = torch.tensor([row - begin for row in wanted if 0 <= row - begin < ROWS_PER_PASS], dtype=torch.int64)
            part = x[rows].contiguous()
            parts.append(run_pass(self._struct, part, slots[rows], positions[rows], here, threads))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    # inside

    def _threads_for(self, rows: int) -> int:
        """A pass over a small model is over before several threads have met."""
        work = self.weight_bytes * max(1, min(rows, ROWS_PER_PASS) // 8)
        return max(1, min(self._threads or torch.get_num_threads(), work // BYTES_PER_THREAD))

    def _fill(self) -> DecoderStruct:
        decoder = self.decoder
        return DecoderStruct(
            decoder.width,
            decoder.heads,
            decoder.kv_heads,
            decoder.head_width,
            decoder.inner,
            len(decoder.blocks),
            decoder.vocabulary,
            NORMS[decoder.norm],
            ACTIVATIONS[decoder.activation],
            0 if decoder.cosines is None else 2 * decoder.cosines.shape[1],
            0,  # of the cache: see `open`
            0,
            decoder.norm_epsilon,
            decoder.attention_scale,
            self._floats(decoder.cosines),
            self._floats(decoder.sines),
            ctypes.addressof(self._layers),
            self._floats(decoder.last_norm.weight),
            self._floats(decoder.last_norm.bias),
            self._weight(decoder.head, storage_of_head(self.storage)),
        )

    def _layer(self, block: Block) -> LayerStruct:
        norms = (block.norm1.weight, block.norm1.bias, block.norm2.weight, block.norm2.bias)
        floats = [self._floats(one) for one in (*norms, block.query_norm, block.key_norm)]
        linears = (block.qkv, block.out, block.up, block.gate, block.down)
        weights = [self._weight(one, self.storage) for one in linears]
        return LayerStruct(*floats, *weights, block.window or 0)

    def _weight(self, linear: Linear | None, storage: Storage) -> WeightStruct:
        if linear is None:
            return WeightStruct()
        panels = packed(linear, storage)
        self._kept.append(panels)
        self.weight_bytes += panels.nbytes
        return panels.struct()

    def _floats(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        floats = tensor.detach().float().contiguous()
        self._kept.append(floats)
        return pointer(floats)


def packed(linear: Linear, storage: Storage) -> Panels:
    """A linear layer's weights in panels. Where inputs are no whole number of int4's groups, it is left in 8 bits."""
    if storage == "int4" and linear.weight.shape[1] % INT4_GROUP == 0:
        return pack_int4(*quantize_groups_int4(linear.weight), linear.bias)
    if storage in ("int8", "int4"):
        return pack_int8(*quantize_rows_int8(linear.weight), linear.bias)
    return pack_dense(linear.weight, linear.bias, torch.bfloat16 if storage == "bf16" else torch.float32)
