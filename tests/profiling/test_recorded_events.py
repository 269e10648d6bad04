"""From what torch's profiler returns to plain events: steps, kernels, and what disturbed a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from flatout.profiling.recorded_events import STEP, links_of, recorded
from flatout.profiling.window import MOST_STEPS_UNCOUNTED, steps_to_profile


def function_event(
    name: str,
    start: float,
    end: float,
    *,
    number: int = 0,
    linked: int = 0,
    device: str = "DeviceType.CPU",
    parent: Any = None,
    shapes: Any = (),
    annotation: bool = False,
    scope: int = 0,
    kernels: Any = (),
    size_bytes: int | None = None,
) -> Any:
    """What the profiler's event has of interest here."""
    return SimpleNamespace(
        name=name,
        time_range=SimpleNamespace(start=start, end=end),
        id=number,
        linked_correlation_id=linked,
        device_type=device,
        is_async=False,
        is_user_annotation=annotation,
        cpu_parent=parent,
        input_shapes=shapes,
        scope=scope,
        kernels=kernels,
        event_metadata=SimpleNamespace(bytes=size_bytes),
    )


def test_events_of_whole_steps() -> None:
    step = function_event("ProfilerStep*", 0, 10, annotation=True)
    outer = function_event("aten::linear", 1, 5, parent=step, shapes=[[8, 16], [4, 16], [], [4]])
    inner = function_event("aten::addmm", 2, 4, parent=outer, scope=1)
    last = function_event("ProfilerStep*", 10, 20, annotation=True)
    after = function_event("aten::relu", 21, 22)
    found = recorded([step, outer, inner, last, after], steps=2)
    assert [one.name for one in found.events] == ["ProfilerStep*", "aten::linear", "aten::addmm", "ProfilerStep*"]
    assert [one.parent for one in found.events] == [None, 0, 1, None]
    assert found.events[1].shapes == ((8, 16), (4, 16), (4,))
    assert found.events[1].seconds == pytest.approx(4e-6)
    assert [one.backward for one in found.events] == [False, False, True, False]
    assert (found.steps, found.left_out) == (2, 0)


def test_a_step_that_took_much_longer_is_left_out() -> None:
    steps = [function_event("ProfilerStep*", start, end) for start, end in ((0, 10), (10, 100), (100, 111))]
    inside = [function_event("aten::mm", at, at + 1) for at in (5, 50, 105)]
    found = recorded([*steps, *inside], steps=3)
    assert (found.steps, found.left_out) == (2, 1)
    assert [one.begin for one in found.events if one.name == "aten::mm"] == [pytest.approx(5e-6), pytest.approx(105e-6)]


def test_a_step_that_was_not_whole_is_left_out() -> None:
    steps = [function_event("ProfilerStep*", start, end) for start, end in ((0, 10), (10, 15))]
    found = recorded([*steps, function_event("aten::mm", 12, 13)], steps=1)
    assert [one.name for one in found.events] == ["ProfilerStep*"]


def test_kernels_belong_to_the_operator_that_launched_them_however_late_they_run() -> None:
    cuda = "DeviceType.CUDA"
    step = function_event("ProfilerStep*", 0, 10, number=1)
    launch = [SimpleNamespace(name="gemm", device=0, duration=30.0)]
    product = function_event("aten::mm", 1, 3, number=7, kernels=launch)
    later = function_event("aten::relu", 12, 13, number=8)
    kernels = [
        function_event("gemm", 20, 50, linked=7, device=cuda),
        function_event("Memcpy HtoD (Pinned -> Device)", 50, 60, linked=7, device=cuda, size_bytes=1000),
        function_event("Memset (Device)", 60, 61, linked=7, device=cuda),
        function_event("ncclDevKernel_AllReduce", 61, 62, linked=7, device=cuda),
        function_event("relu_kernel", 62, 63, linked=8, device=cuda),
        function_event("ProfilerStep*", 20, 63, device=cuda, annotation=True),
    ]
    found = recorded([step, product, later, *kernels], steps=1)
    assert [one.kind for one in found.kernels] == ["kernel", "copy", "set", "communication"]
    assert {one.operator for one in found.kernels} == {1}
    assert found.kernels[1].size_bytes == 1000
    assert found.events[1].device_seconds == pytest.approx(30e-6)


def test_kernels_where_the_profilers_events_alone_say_who_launched_them() -> None:
    """As in torch 2.11. The driver's call has the kernel's number, which may be that of another operator."""
    step = function_event("ProfilerStep*", 0, 10, number=1)
    product = function_event("aten::mm", 1, 3, number=7)
    launch = function_event("cudaLaunchKernel", 2, 3, number=9, parent=product)
    other = function_event("aten::relu", 4, 5, number=9)
    kernel = function_event("gemm", 20, 50, number=9, device="DeviceType.CUDA")
    events = [step, product, launch, other, kernel]
    for one in events:
        del one.linked_correlation_id

    def raw(one: Any, linked: int) -> Any:
        values = {"device_type": one.device_type, "correlation_id": one.id, "name": one.name}
        return SimpleNamespace(
            linked_correlation_id=lambda: linked, **{name: lambda value=value: value for name, value in values.items()}
        )

    links = links_of([raw(product, 0), raw(launch, 7), raw(other, 0), raw(kernel, 7)])
    found = recorded(events, steps=1, links=links)
    assert [(one.name, one.operator) for one in found.kernels] == [("gemm", 1)]


@pytest.mark.parametrize(
    ("asked", "operators", "expected"),
    [(5, 100, 5), (2000, 4000, 5), (5, 100_000, 1), (5, 200_000, 0), (5, None, 5), (2000, None, MOST_STEPS_UNCOUNTED)],
)
def test_the_window_is_bounded_by_operators(asked: int, operators: int | None, expected: int) -> None:
    assert steps_to_profile(asked, operators) == expected


def test_labels_of_a_profiler_of_the_scripts_are_no_steps() -> None:
    """`profiler.step()` of a script labels its own steps, which begin and end elsewhere, whatever it records."""
    ours = [function_event(STEP, start, start + 10, annotation=True) for start in (0, 10)]
    theirs = [function_event("ProfilerStep*", start, start + 10, annotation=True) for start in (-4, 6, 16)]
    calls = [function_event("aten::mm", at, at + 1) for at in (5, 15)]
    found = recorded(sorted([*ours, *theirs, *calls], key=lambda one: one.time_range.start), steps=2)
    assert found.steps == 2
    assert sum(one.name == "aten::mm" for one in found.events) == 2
