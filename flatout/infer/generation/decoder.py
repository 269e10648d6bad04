"""A decoder-only Transformer as generation needs it: its sizes and its weights, whoever's model they are from.

A value of tensors and numbers, without modules: what runs it (native_decoder.py on a CPU with a compiler,
torch_decoder.py anywhere) is chosen apart from where it came from (families.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from torch import Tensor

NormKind = Literal["layer", "rms"]
Activation = Literal["gelu", "gelu_tanh", "silu", "relu"]


@dataclass(frozen=True, kw_only=True)
class Linear:
    """x @ weight.T + bias."""

    weight: Tensor
    """Floating point [outputs, inputs]."""
    bias: Tensor | None = None
    """[outputs]."""


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
    end_tokens: tuple[int, ...] = ()
    """Tokens at which the model was taught to end."""

    @property
    def width(self) -> int:
        """Of a token between blocks."""
        return self.tokens.shape[1]

    @property
    def vocabulary(self) -> int:
        """Token ids are below it."""
        return self.head.weight.shape[0]

    @property
    def inner(self) -> int:
        """Width in the middle of the feed-forward."""
        return self.blocks[0].up.weight.shape[0]

    @cached_property
    def matrix_weights(self) -> int:
        """Weights that each token is multiplied with: the linear layers and the head."""
        linears = [one for block in self.blocks for one in (block.qkv, block.out, block.up, block.gate, block.down)]
        return sum(one.weight.numel() for one in (*linears, self.head) if one is not None)

    def cache_bytes_per_token(self, element_bytes: int) -> int:
        """Keys and values that one token leaves behind."""
        return 2 * len(self.blocks) * self.kv_heads * self.head_width * element_bytes
