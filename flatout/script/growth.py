"""Does a process grow, or does its size only vary? From samples of its resident memory over time.

Allocators take memory in jumps, keep it, and fill up at the start; comparing two medians would show that as growth. A
leak continues: the last two thirds of the run are cut into stretches, and each must lie above the one before it, by
amounts that do not fade. With independent noise, six stretches are in order once in 720 times.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

STRETCHES = 6
SAMPLES_A_STRETCH = 3
LEAST_BYTES = 16 << 20
"""Allocators alone do this much."""
LEAST_RISE_SHARE, LAST_RISE_SHARE = 0.25, 0.5
"""Share of the mean rise between stretches, for any of them and for the last; with less, growth has stopped."""
SCATTERS = 3.0
"""The whole rise against the median deviation of samples from their stretch."""


@dataclass(frozen=True, kw_only=True)
class Growth:
    """From the median of the first stretch to that of the last."""

    first_bytes: int
    last_bytes: int
    seconds: float
    steps: int

    @property
    def bytes_per_hour(self) -> float:
        return (self.last_bytes - self.first_bytes) / self.seconds * 3600

    @property
    def bytes_per_step(self) -> float | None:
        return (self.last_bytes - self.first_bytes) / self.steps if self.steps else None


def steady_growth(samples: Sequence[tuple[float, int, int]]) -> Growth | None:
    """samples: (clock in seconds, step, resident bytes) in order. None: no growth beyond noise."""
    later = samples[len(samples) // 3 :]
    size = len(later) // STRETCHES
    if size < SAMPLES_A_STRETCH:
        return None
    stretches = [later[index * size : (index + 1) * size] for index in range(STRETCHES)]
    levels = [statistics.median(one[2] for one in stretch) for stretch in stretches]
    rises = [after - before for before, after in itertools.pairwise(levels)]
    total = levels[-1] - levels[0]
    pairs = zip(stretches, levels, strict=True)
    scatter = statistics.median(abs(one[2] - level) for stretch, level in pairs for one in stretch)
    mean = total / len(rises)
    steady = min(rises) >= LEAST_RISE_SHARE * mean and rises[-1] >= LAST_RISE_SHARE * mean
    if total < LEAST_BYTES or not steady or total < SCATTERS * scatter:
        return None
    first, last = stretches[0][size // 2], stretches[-1][size // 2]
    return Growth(
        first_bytes=int(levels[0]), last_bytes=int(levels[-1]), seconds=last[0] - first[0], steps=last[1] - first[1]
    )
