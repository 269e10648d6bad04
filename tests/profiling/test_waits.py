"""What waiting for a GPU costs, from recorded calls and kernels."""

from __future__ import annotations

from typing import Any

import pytest

from flatout.profiling.attribution import attribute
from flatout.profiling.recorded_events import Event, Kernel, Recording
from flatout.profiling.waits import cost_of, waits_in


def kernel(begin: float, end: float, **values: Any) -> Kernel:
    return Kernel(**{"name": "gemm", "kind": "kernel", **values}, begin=begin, end=end)


def read(begin: float, end: float) -> list[Event]:
    """A call of .item(), whose driver call is its last child."""
    return [
        Event(name="aten::_local_scalar_dense", begin=begin, end=end),
        Event(name="cudaStreamSynchronize", begin=begin, end=end, parent=0),
    ]


def test_a_wait_costs_the_time_for_which_the_gpu_then_has_no_work() -> None:
    recording = Recording(events=tuple(read(1.0, 5.0)), kernels=(kernel(0.0, 4.9), kernel(5.3, 9.0)))
    (wait,) = waits_in(recording)
    assert (wait.seconds, wait.idle_seconds) == (4.0, pytest.approx(0.4))
    assert cost_of([wait]) == pytest.approx(0.4)


def test_no_more_than_the_wait_where_the_host_is_late_anyway() -> None:
    recording = Recording(events=tuple(read(5.0, 5.01)), kernels=(kernel(0.0, 1.0), kernel(6.0, 7.0)))
    assert cost_of(waits_in(recording)) == pytest.approx(0.01)


def test_two_waits_before_the_same_kernel_count_once() -> None:
    events = [*read(1.0, 2.0), Event(name="cudaStreamSynchronize", begin=2.0, end=2.1, parent=0)]
    recording = Recording(events=tuple(events), kernels=(kernel(0.0, 2.0), kernel(2.5, 3.0)))
    assert [one.idle_seconds for one in waits_in(recording)] == [pytest.approx(0.5), 0.0]


def test_other_work_that_goes_on_leaves_no_gap() -> None:
    """As on another stream."""
    recording = Recording(events=tuple(read(1.0, 2.0)), kernels=(kernel(0.0, 1.9), kernel(0.5, 4.0), kernel(3.0, 5.0)))
    assert waits_in(recording)[0].idle_seconds == 0


def test_at_the_ends_of_the_recording_nothing_is_known() -> None:
    assert waits_in(Recording(events=tuple(read(1.0, 2.0)), kernels=(kernel(0.0, 1.0),)))[0].idle_seconds == 0
    assert waits_in(Recording(events=tuple(read(0.0, 0.1)), kernels=(kernel(0.3, 1.0),)))[0].idle_seconds == 0


def test_a_copy_whose_operator_is_unknown_explains_no_wait() -> None:
    copy = kernel(0.0, 0.5, name="Memcpy HtoD (Pageable -> Device)", kind="copy")
    events = (Event(name="cudaDeviceSynchronize", begin=0.6, end=1.0),)
    (wait,) = waits_in(Recording(events=events, kernels=(copy, kernel(1.2, 2.0))))
    assert not wait.copies_to_device


def test_copies_to_the_gpu_are_told_apart_from_reads() -> None:
    events = (
        Event(name="aten::copy_", begin=0.0, end=1.0),
        Event(name="cudaStreamSynchronize", begin=0.1, end=1.0, parent=0),
        Event(name="aten::_local_scalar_dense", begin=2.0, end=3.0),
        Event(name="cudaStreamSynchronize", begin=2.0, end=3.0, parent=2),
    )
    kernels = (
        kernel(0.5, 0.9, name="Memcpy HtoD (Pageable -> Device)", kind="copy", operator=0),
        kernel(1.2, 2.8),
        kernel(3.1, 4.0),
    )
    recording = Recording(events=events, kernels=kernels)
    assert [one.copies_to_device for one in waits_in(recording)] == [True, False]
    found = attribute(recording, [], steps=2, on_gpu=True)
    assert [(row.operator, row.calls, row.seconds) for row in found.waits] == [("aten::_local_scalar_dense", 0.5, 0.5)]
    assert found.waiting_cost_seconds == pytest.approx(0.15)
    assert found.copying_cost_seconds == pytest.approx(0.15)
