"""A run of tokens of one sequence: the unit in which decoders are advanced."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Span:
    """`length` tokens of the sequence in `slot` of the cache, the first at position `start`."""

    slot: int
    start: int
    length: int = 1
