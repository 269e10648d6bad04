"""What was exchanged with other ranks in the profiled steps, and how much of it computation overlapped.

On a GPU a collective is a kernel in a queue of its own: what runs beside it on the same GPU overlaps it. On a CPU
threads of the backend carry it out, and the waits of the process for them are timed in the same steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flatout.profiling.profile import CollectiveRow, Communication
from flatout.profiling.recorded_events import Recording

Interval = tuple[float, float]


def communication(recording: Recording, *, steps: int, exposed_seconds: float | None) -> Communication | None:
    """Per step; None: nothing was exchanged. exposed_seconds: of a profiled step, where the waits were timed."""
    kernels = [one for one in recording.kernels if one.kind == "communication"]
    calls = kernels or recording.collectives
    if not calls or not steps:
        return None
    spans = union((one.begin, one.end) for one in calls)
    total = length(spans) / steps
    if kernels:
        others = union((one.begin, one.end) for one in recording.kernels if one.kind != "communication")
        exposed_seconds = total - length(overlap(spans, others)) / steps
    known = None if exposed_seconds is None else min(total, exposed_seconds)
    return Communication(
        total_seconds=total,
        exposed_seconds=known,  # without what calls and unpacking take before and after
        overlapped_seconds=None if known is None else total - known,
        collectives=_rows([(one.name, one.end - one.begin) for one in calls], steps),
    )


def _rows(calls: Sequence[tuple[str, float]], steps: int) -> tuple[CollectiveRow, ...]:
    found: dict[str, list[float]] = {}
    for name, seconds in calls:
        found.setdefault(name, []).append(seconds)
    rows = (
        CollectiveRow(name=name, calls=len(all_) / steps, seconds=sum(all_) / steps) for name, all_ in found.items()
    )
    return tuple(sorted(rows, key=lambda row: -row.seconds))


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points of time, in intervals that do not touch.

    >>> union([(3, 4), (0, 2), (1, 2.5)])
    [(0, 2.5), (3, 4)]
    """
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def overlap(ones: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """What is in both; each is ordered, and its intervals do not touch.

    >>> overlap([(0, 2), (3, 5)], [(1, 4)])
    [(1, 2), (3, 4)]
    """
    found: list[Interval] = []
    one = other = 0
    while one < len(ones) and other < len(others):
        begin, end = max(ones[one][0], others[other][0]), min(ones[one][1], others[other][1])
        if begin < end:
            found.append((begin, end))
        if ones[one][1] < others[other][1]:
            one += 1
        else:
            other += 1
    return found


def length(intervals: Sequence[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)
