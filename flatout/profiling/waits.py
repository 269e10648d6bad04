"""Where the host waits for a GPU in a recording, and what that costs.

A wait costs nothing while the GPU has work: that would have to be done all the same. What it costs is the time for
which the GPU then has nothing to do, because the host could not queue anything meanwhile; and no more than the wait,
where the host is late anyway.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from flatout.profiling.recorded_events import Recording

_WAITING = """
cudaStreamSynchronize cudaDeviceSynchronize cudaEventSynchronize cudaMemcpy cuStreamSynchronize cuCtxSynchronize
hipStreamSynchronize hipDeviceSynchronize hipEventSynchronize
"""
WAITING = frozenset(_WAITING.split())


@dataclass(frozen=True, kw_only=True)
class Wait:
    """One call of the driver that returns when the GPU is done."""

    event: int
    """Index of the call in the recording."""
    seconds: float
    idle_seconds: float
    """For which the GPU had no work around the end of the wait; counted at the first of several waits."""
    copies_to_device: bool
    """Is it a part of a copy from the host's pageable memory?"""


def waits_in(recording: Recording) -> list[Wait]:
    """In the order of the calls."""
    kernels = sorted(recording.kernels, key=lambda one: one.begin)
    begins, ends = [one.begin for one in kernels], list(accumulate((one.end for one in kernels), max))
    copies = [one for one in kernels if one.kind == "copy" and "HtoD" in one.name]
    copying = {one.operator for one in copies if one.operator is not None}
    found, counted = [], set[int]()
    for number, event in enumerate(recording.events):
        if event.name not in WAITING:
            continue
        following = bisect_right(begins, event.end)
        idle = _idle_before(following, begins, ends) if following not in counted else 0.0
        counted.add(following)
        found.append(
            Wait(event=number, seconds=event.seconds, idle_seconds=idle, copies_to_device=event.parent in copying)
        )
    return found


def cost_of(waits: Sequence[Wait]) -> float:
    """Seconds that the GPU had no work because of these waits."""
    return min(sum(one.seconds for one in waits), sum(one.idle_seconds for one in waits))


def _idle_before(following: int, begins: Sequence[float], ends: Sequence[float]) -> float:
    """Between the end of all earlier kernels and the begin of this one; 0 at either end of the recording."""
    if not 0 < following < len(begins):
        return 0.0
    return max(0.0, begins[following] - ends[following - 1])
