"""What torch's own CPU allocator held, as its profiler recorded it.

with allocator_recorded() as peak_in_window:
    model = ...
    with window():
        step(batch)
peak_in_window()    # bytes: everything since the record began, at its highest within the window
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

_MARK = "window"


def window() -> contextlib.AbstractContextManager[Any]:
    return record_function(_MARK)


@contextlib.contextmanager
def allocator_recorded() -> Iterator[Callable[[], int]]:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield lambda: _peak(profiler.profiler.kineto_results.events())


def _peak(events: Any) -> int:
    began = next(one.start_ns() for one in events if one.name() == _MARK)
    held = peak = 0
    for when, size in sorted((one.start_ns(), one.nbytes()) for one in events if one.name() == "[memory]"):
        held += size
        peak = max(peak, held) if when >= began else peak
    return peak
