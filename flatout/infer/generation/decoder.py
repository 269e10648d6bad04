"""A decoder-only Transformer as generation needs it: sizes and weights, independent of the model's class.

A value of tensors and numbers, without modules: what runs it (native_decoder.py on a CPU with a compiler,
torch_decoder.py anywhere) does not depend on where it came from (families.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from flatout.errors import PlanError
from flatout.plan import Plan

Storage = Literal["fp32", "bf16", "int8", "int4"]


def storage_of(plan: Plan) -> Storage:
    """The plan's weights (int8, int4), else its precision; without either fp32, which changes nothing."""
    if plan.precision == "fp16":
        limit = "generation holds weights in fp32, bf16, int8 or int4"
        raise PlanError("precision is 'fp16'", limit=limit, remedy="set precision = 'bf16'")
    return plan.weights or plan.precision or "fp32"


def storage_of_head(storage: Storage) -> Storage:
    """A 4-bit head would cost more accuracy than all blocks together, and is a small part of a large model."""
    return "int8" if storage == "int4" else storage


NormKind = Literal["layer", "rms"]
Activation = Literal["gelu", "gelu_tanh", "silu", "relu"]


@dataclass(frozen=True, kw_only=True)
class Linear:
    """x @ weight.T + bias, where the weight may lie in several parts, which share the outputs in their order."""

    weights: tuple[Tensor, ...]
    """Floating point [outputs of the part, inputs], each where the model has it."""
    biases: tuple[Tensor | None, ...] = (None,)
    """[outputs of the part], one for each part."""

    @property
    def outputs(self) -> int:
        return sum(len(one) for one in self.weights)

    @property
    def inputs(self) -> int:
        return self.weights[0].shape[1]

    def weight(self) -> Tensor:
        """[outputs, inputs] in one piece: a copy, if it lies in parts."""
        parts = [one.detach() for one in self.weights]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def bias(self) -> Tensor | None:
        """[outputs], zeros for a part without one; None if none has one."""
        if all(one is None for one in self.biases):
            return None
        pairs = zip(self.weights, self.biases, strict=True)
        parts = [weight.new_zeros(len(weight)) if one is None else one.detach() for weight, one in pairs]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(frozen=True, kw_only=True)
class Norm:
    """(x - mean) / deviation * weight + bias; of kind "rms" without the mean."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Block:
    """x + out(attention(norm1(x))), then x + down(activation(gate(norm2(x))) * up(norm2(x)))."""

    norm1: Norm
    qkv: Linear
    """Queries of all heads, then keys, then values of all kv heads."""
    query_norm: Tensor | None = None
    """[head width]: rms norm of each query before it is turned to its position."""
    key_norm: Tensor | None = None
    out: Linear
    norm2: Norm
    up: Linear
    gate: Linear | None = None
    """None: down(activation(up(norm2(x))))."""
    down: Linear
    window: int | None = None
    """A token sees this many last ones, itself among them; None = all."""


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """Sizes and weights of one model."""

    family: str
    """Whose layout it was: "GPT-2 of flatout.models", "Llama of transformers"."""
    heads: int
    kv_heads: int
    head_width: int
    max_tokens: int
    """The longest sequence, prompt and new tokens together."""
    norm: NormKind
    norm_epsilon: float
    activation: Activation
    attention_scale: float
    """What products of queries and keys are multiplied with."""
    tokens: Tensor
    """Embedding [vocabulary or more, width]."""
    positions: Tensor | None = None
    """Learnt or fixed vectors that are added, [max_tokens, width]."""
    cosines: Tensor | None = None
    """Rotary positions, fp32 [max_tokens, rotated width / 2]; the first half of a head is paired with the second."""
    sines: Tensor | None = None
    blocks: Sequence[Block]
    last_norm: Norm
    head: Linear
    """[vocabulary, width]."""

    @property
    def width(self) -> int:
        """Of a token between blocks."""
        return self.tokens.shape[1]

    @property
    def vocabulary(self) -> int:
        """Token ids are below it."""
        return self.head.outputs

    @property
    def inner(self) -> int:
        """Width in the middle of the feed-forward."""
        return self.blocks[0].up.outputs

    @cached_property
    def matrix_weights(self) -> int:
        """Weights that each token is multiplied with: the linear layers and the head."""
        return sum(one.outputs * one.inputs for one in self.linears)

    @property
    def linears(self) -> list[Linear]:
        """Every matrix: those of the blocks, then the head."""
        found = [one for block in self.blocks for one in (block.qkv, block.out, block.up, block.gate, block.down)]
        return [one for one in (*found, self.head) if one is not None]

    def tensors(self) -> list[Tensor]:
        """Everything that was read of the model."""
        norms = [self.last_norm, *(norm for block in self.blocks for norm in (block.norm1, block.norm2))]
        found = [self.tokens, self.positions]
        found += [part for norm in norms for part in (norm.weight, norm.bias)]
        found += [part for block in self.blocks for part in (block.query_norm, block.key_norm)]
        found += [part for one in self.linears for part in (*one.weights, *one.biases)]
        return [one for one in found if one is not None]

    def cache_bytes_per_token(self, element_bytes: int) -> int:
        """Keys and values that one token leaves behind."""
        return 2 * len(self.blocks) * self.kv_heads * self.head_width * element_bytes
