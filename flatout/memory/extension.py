"""From the timelines of a few small steps to that of a large one, dimension by dimension of every tensor.

A dimension that is constant, or grows by whole numbers with the samples, is exact at any size, and so are products of
such dimensions, as the square of a batch. Others depend on the data, for example on a mask: they are taken to be the
same share of the samples, and how far a share of so few may be off follows from counting: 2 standard deviations of k
events are 2 / sqrt(k) of them, and where none was seen, up to 3 may have been expected.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flatout.memory.timeline import Allocation, Timeline

DEVIATIONS = 2.0
NONE_SEEN = 3.0


@dataclass(frozen=True, kw_only=True)
class Extended:
    """The timeline that is expected, and the one if everything that depends on the data turns out high."""

    expected: Timeline
    high: Timeline


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Samples of the steps that were taken, and of the one wanted. `parts`: that each step splits its batch into."""

    taken: Sequence[int]
    wanted: int
    parts: int = 1


def extended(timelines: Sequence[Timeline], sizes: Sizes) -> Extended | None:
    """None where they do not allocate and free for the same operations in the same order. Sizes ascend."""
    last = timelines[-1]
    if any(one.events != last.events or len(one.allocations) != len(last.allocations) for one in timelines):
        return None
    expected: list[Allocation] = []
    high: list[Allocation] = []
    for ones in zip(*(timeline.allocations for timeline in timelines), strict=True):
        if any(one.operation != ones[-1].operation or len(one.shape) != len(ones[-1].shape) for one in ones):
            return None
        size_bytes, high_bytes = _bytes(ones, sizes)
        expected.append(replace(ones[-1], size_bytes=size_bytes))
        high.append(replace(ones[-1], size_bytes=high_bytes))
    return Extended(expected=Timeline(expected, last.events), high=Timeline(high, last.events))


def _bytes(ones: Sequence[Allocation], sizes: Sizes) -> tuple[int, int]:
    """(expected, high) of one allocation."""
    measured = [one.size_bytes for one in ones]
    if len(set(measured)) == 1:
        return measured[-1], measured[-1]
    per_element = max((one.size_bytes / math.prod(one.shape) for one in ones if math.prod(one.shape)), default=0.0)
    if not per_element or not ones[-1].shape:  # as a workspace: its bytes are all that is known
        at = _dimension(measured, sizes)
        return round(at[0]), round(at[1])
    dimensions = [_dimension(values, sizes) for values in zip(*(one.shape for one in ones), strict=True)]
    expected, high = (math.prod(one[which] for one in dimensions) for which in (0, 1))
    return round(per_element * expected), round(per_element * high)


def _dimension(values: Sequence[int], sizes: Sizes) -> tuple[float, float]:
    """(expected, high) at the size that is asked for."""
    if len(set(values)) == 1:
        return values[-1], values[-1]
    first, last = sizes.taken[0], sizes.taken[-1]
    slope = (values[-1] - values[0]) / (last - first)
    on_a_line = all(
        value == values[0] + slope * (size - first) for value, size in zip(values, sizes.taken, strict=True)
    )
    if on_a_line and slope > 0 and (slope * sizes.parts).is_integer():
        exact = values[-1] + slope * (sizes.wanted - last)
        return exact, exact
    share = values[-1] / last
    expected = share * sizes.wanted
    high = _highest_share(values, sizes.taken) * sizes.wanted
    if all(value <= size for value, size in zip(values, sizes.taken, strict=True)):
        high = min(high, sizes.wanted)  # a choice among the samples
    return expected, high


def _highest_share(values: Sequence[int], taken: Sequence[int]) -> float:
    count, samples = values[-1], taken[-1]
    if not count:
        return NONE_SEEN / samples
    by_counting = DEVIATIONS / math.sqrt(count)
    share = count / samples
    apart = max(abs(value / size / share - 1) for value, size in zip(values, taken, strict=True))
    return share * (1 + max(by_counting, apart))
