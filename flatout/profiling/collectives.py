"""What was exchanged with other ranks in the profiled steps, and how much of it computation overlapped.

On a GPU a collective is a kernel in a queue of its own: what runs beside it on the same GPU overlaps it. On a CPU
threads of the backend carry it out, and the waits of the process for them are timed in the same steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from flatout.profiling.profile import CollectiveRow, Communication
from flatout.profiling.recorded_events import Recording


def communication(recording: Recording, *, steps: int, exposed_seconds: float | None) -> Communication | None:
    """Per step; None: nothing was exchanged. exposed_seconds: of a profiled step, where the waits were timed."""
    kernels = [one for one in recording.kernels if one.kind == "communication"]
    calls = kernels or recording.collectives
    if not calls or not steps:
        return None
    spans = [(one.begin, one.end) for one in calls]
    total = covered(spans) / steps
    if kernels:
        others = [(one.begin, one.end) for one in recording.kernels if one.kind != "communication"]
        exposed_seconds = max(0.0, covered([*spans, *others]) - covered(others)) / steps
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


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Time within at least one of them.

    >>> covered([(3, 4), (0, 2), (1, 2.5)])
    3.5
    """
    total, until = 0.0, -math.inf
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total
