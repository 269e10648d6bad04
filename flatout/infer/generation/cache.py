"""The key-value cache: allocated at full length, so that nothing moves while it grows.

A slot holds one sequence; position p of it is row p. Positions past a sequence's end are never read, so a slot is
reused, or truncated after a wrong guess, without being cleared.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flatout.errors import UsageError
from flatout.infer.generation.decoder import Decoder


@dataclass(frozen=True, kw_only=True)
class Span:
    """`length` tokens of the sequence in `slot` of the cache, the first at position `start`."""

    slot: int
    start: int
    length: int = 1


LENGTH_STEP = 16
"""Lengths are multiples of it: the native kernel stores keys in panels of this size."""


class KeyValueCache:
    """Tensors [slots, kv heads, length, head width], one of keys and one of values for each block.

    How keys lie within a slot's plane [length, head width] is the business of who reads and writes them.
    """

    def __init__(
        self, decoder: Decoder, *, slots: int, length: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        if length > decoder.max_tokens:
            what = f"a cache of {length} tokens"
            raise UsageError(what, limit=f"the model reads at most {decoder.max_tokens}")
        length = -(-length // LENGTH_STEP) * LENGTH_STEP
        shape = (slots, decoder.kv_heads, length, decoder.head_width)
        self.slots, self.length, self.dtype = slots, length, dtype
        count = len(decoder.blocks)
        with torch.inference_mode(False):  # what is made in it can be written to only there, and caches are used again
            self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(count)]
            self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(count)]

    def check(self, span: Span) -> None:
        """UsageError where these places are not in the cache."""
        if not 0 <= span.slot < self.slots:
            raise UsageError(f"slot {span.slot}", limit=f"the cache has slots 0 to {self.slots - 1}")
        if span.length < 1 or span.start < 0 or span.start + span.length > self.length:
            what = f"{span.length} tokens from position {span.start}"
            raise UsageError(what, limit=f"the cache holds positions 0 to {self.length - 1}")

    def tensors(self, block: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one block."""
        return self.keys[block], self.values[block]
