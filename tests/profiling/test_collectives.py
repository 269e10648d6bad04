"""Exchanges with other ranks: how long at least one is under way, and how much of that nothing overlaps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import distributed

from flatout.profiling.collectives import communication, covered
from flatout.profiling.recorded_events import Event, Kernel, Recording
from flatout.profiling.window import ProfilerWindow


def test_time_is_covered_once() -> None:
    assert covered([]) == 0.0
    assert covered([(5.0, 6.5), (0.0, 1.0), (1.0, 2.0), (0.5, 1.5)]) == 3.5
    assert covered([(0.0, 10.0), (1.0, 2.0), (9.0, 12.0)]) == 12.0


def test_on_the_host_what_is_not_waited_for_is_overlapped() -> None:
    calls = tuple(Event(name="gloo:all_reduce", begin=at, end=at + 2) for at in (0.0, 1.0, 10.0, 11.0))
    found = communication(Recording(events=(), collectives=calls), steps=2, exposed_seconds=1.0)
    assert found is not None
    assert (found.total_seconds, found.exposed_seconds, found.overlapped_seconds) == (3.0, 1.0, 2.0)
    (row,) = found.collectives
    assert (row.name, row.calls, row.seconds) == ("gloo:all_reduce", 2.0, 4.0)  # two at once count twice here


def test_a_wait_is_longer_than_what_is_waited_for() -> None:
    """By the call and by unpacking."""
    calls = (Event(name="gloo:broadcast", begin=0.0, end=1.0),)
    found = communication(Recording(events=(), collectives=calls), steps=1, exposed_seconds=1.5)
    assert found is not None
    assert (found.exposed_seconds, found.overlapped_seconds) == (1.0, 0.0)


def test_waits_that_were_not_timed_are_unknown() -> None:
    calls = (Event(name="gloo:broadcast", begin=0.0, end=1.0),)
    found = communication(Recording(events=(), collectives=calls), steps=1, exposed_seconds=None)
    assert found is not None
    assert (found.total_seconds, found.exposed_seconds, found.overlapped_seconds) == (1.0, None, None)
    assert communication(Recording(events=()), steps=1, exposed_seconds=1.0) is None


def test_on_a_gpu_kernels_overlap() -> None:
    kernels = (
        Kernel(name="ncclDevKernel_AllReduce", begin=0.0, end=4.0, kind="communication"),
        Kernel(name="gemm", begin=1.0, end=2.0, kind="kernel"),
        Kernel(name="add", begin=1.5, end=3.0, kind="kernel"),
    )
    found = communication(Recording(events=(), kernels=kernels), steps=1, exposed_seconds=None)
    assert found is not None
    assert (found.total_seconds, found.exposed_seconds, found.overlapped_seconds) == (4.0, 2.0, 2.0)


def test_the_profiler_records_collectives_of_the_host(tmp_path: Path) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        window = ProfilerWindow(on_gpu=False)
        window.start()
        distributed.all_reduce(torch.ones(8))
        recording = window.stop()
    finally:
        distributed.destroy_process_group()
    assert recording is not None
    found = communication(recording, steps=1, exposed_seconds=0.0)
    assert found is not None
    assert [row.name for row in found.collectives] == ["gloo:all_reduce"]
    assert found.total_seconds == pytest.approx(found.overlapped_seconds)
