"""What ranks measured between them, as values: collectives by size, pairs of ranks, and a product on each rank.

The usual model of a transfer is seconds = latency + bytes / bandwidth; `fit` finds both for a collective.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flatout.statistics import median


@dataclass(frozen=True, kw_only=True)
class RankTiming:
    """One rank, and how fast it multiplies."""

    rank: int
    machine: int
    """Which one, from 0; several may have the same host name."""
    host: str
    device: str
    """The GPU's name, or 'cpu'."""
    threads: int
    """Of the product on a CPU: as many on all ranks."""
    product_seconds: tuple[float, ...]
    """Samples of the same matrix product, on all ranks at the same time."""


@dataclass(frozen=True, kw_only=True)
class SizeTiming:
    """A collective on tensors of one size."""

    size_bytes: int
    """Of the whole tensor: the gathered one of an all_gather, the one to be scattered of a reduce_scatter."""
    samples_seconds: tuple[float, ...]
    """Of one call each, until the last rank was done."""

    @property
    def median_seconds(self) -> float:
        return median(self.samples_seconds)


@dataclass(frozen=True, kw_only=True)
class CollectiveTiming:
    """One collective over all ranks."""

    name: str
    sizes: tuple[SizeTiming, ...]
    missing: str = ""
    """Why sizes are missing; '' if none is."""


@dataclass(frozen=True, kw_only=True)
class PairTiming:
    """Two ranks that sent to each other while the others waited. Samples: of one message, half of the way there and
    back."""

    ranks: tuple[int, int]
    small_bytes: int
    small_seconds: tuple[float, ...]
    large_bytes: int
    large_seconds: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Timings:
    """All of it."""

    backend: str
    ranks: tuple[RankTiming, ...]
    collectives: tuple[CollectiveTiming, ...]
    pairs: tuple[PairTiming, ...]
    pairs_missing: str = ""
    seconds: float
    """That measuring took."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """seconds = latency_seconds + bytes / bytes_per_second."""

    latency_seconds: float
    bytes_per_second: float
    error: float
    """The median over the sizes of |fitted / measured - 1|."""


def fit(points: Sequence[tuple[float, float]]) -> Fit | None:
    """Latency and bandwidth of (bytes, seconds), of at least three sizes; None where they do not determine both.

    Of the lines through two of the points, the one with the smallest sum of relative errors, so that small messages
    count as much as large ones and a few disturbed sizes do not matter.
    """
    if len(points) < 3:
        return None
    best, least = None, math.inf
    for number, (size, seconds) in enumerate(points):
        for other_size, other_seconds in points[number + 1 :]:
            if other_size == size:
                continue
            slope = (other_seconds - seconds) / (other_size - size)
            latency = max(seconds - slope * size, 0.0)
            if slope <= 0:
                continue
            errors = [abs(math.log((latency + slope * at) / took)) for at, took in points]
            if sum(errors) < least:
                least = sum(errors)
                error = median([abs((latency + slope * at) / took - 1) for at, took in points])
                best = Fit(latency_seconds=latency, bytes_per_second=1 / slope, error=error)
    return best
