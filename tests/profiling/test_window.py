"""From the windows to a profile, where something is missing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flatout.profiling.following import OperatorFollower, Origin
from flatout.profiling.recorded_events import Event, Recording
from flatout.profiling.window import (
    COMPILED,
    GRAPHED,
    NO_FILE,
    NO_KERNELS,
    NO_TIME,
    NOT_FOLLOWED,
    OTHERS_PROFILER,
    ProfilerWindow,
    Windows,
)

SPANS = {"data": 1e-3, "forward": 2e-3, "backward": 3e-3, "optimizer": 1e-3, "other": 1e-3}
RECORDING = Recording(events=(Event(name="aten::mm", begin=0, end=4e-3),), steps=1, left_out=1)


def windows(**changes: object) -> Windows:
    made = Windows(name="train.py", device="cpu", step_kind="optimizer", asked=2)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_times_alone() -> None:
    found = windows(timed_seconds=[8e-3] * 5, spans=SPANS, obstacle=OTHERS_PROFILER).profile()
    assert found.parts is not None
    assert found.parts.total == pytest.approx(8e-3)
    assert found.reasons["operators"] == OTHERS_PROFILER
    assert (found.flops, found.reasons["flops"]) == (None, NOT_FOLLOWED)
    assert found.notes == ()


@pytest.mark.parametrize(("step", "inside", "on_top"), [(8e-3, 0.0, 2e-3), (10e-3, 2e-3, None)])
def test_parts_add_up_to_the_step_whether_evaluation_is_in_it_or_on_top(
    step: float, inside: float, on_top: float | None
) -> None:
    found = windows(timed_seconds=[step] * 5, spans={**SPANS, "evaluation": 2e-3}, obstacle=OTHERS_PROFILER).profile()
    assert found.parts is not None
    assert found.parts.total == pytest.approx(found.step_seconds)
    assert (found.parts.evaluation, found.evaluation_seconds) == (inside, on_top)


def test_a_profile_alone() -> None:
    found = windows(recording=RECORDING, profiled_seconds=[5e-3, 20e-3], compiled=True).profile()
    assert (found.step_seconds, found.reasons["step_seconds"]) == (None, NO_TIME)
    assert found.overhead is None
    assert [row.seconds for row in found.operators] == [pytest.approx(4e-3)]
    assert found.reasons["lines"] == found.reasons["flops"] == COMPILED
    assert found.parts is not None
    assert found.parts.total == pytest.approx(found.profiled_step_seconds)
    assert found.notes == ("1 of the 2 profiled steps took over 2 times the median and is left out",)


def test_an_error_while_following_is_the_reason() -> None:
    follower = OperatorFollower()
    follower.fault = "ValueError: odd tensor"
    found = windows(recording=RECORDING, profiled_seconds=[5e-3, 5e-3], follower=follower).profile()
    assert found.flops is None
    assert "following a step failed: ValueError: odd tensor" in found.reasons["flops"]
    assert found.reasons["lines"] == found.reasons["flops"]


def test_a_gpu_whose_kernels_the_profiler_does_not_see_is_not_called_idle() -> None:
    found = windows(
        device="cuda:0", recording=RECORDING, profiled_seconds=[5e-3] * 2, timed_seconds=[4e-3] * 5, spans=SPANS
    ).profile()
    assert (found.parts, found.idle_causes, found.operators, found.launches) == (None, (), (), None)
    assert found.reasons["parts"] == found.reasons["operators"] == NO_KERNELS


def test_a_profiler_of_the_scripts_that_starts_meanwhile_goes_first() -> None:
    window = ProfilerWindow(on_gpu=False)
    window.start()
    with torch.autograd.profiler.profile() as theirs:
        torch.ones(2) + 1
    assert window.stop() is None
    assert window.obstacle == OTHERS_PROFILER
    assert "aten::add" in {event.name for event in theirs.function_events or ()}
    again = ProfilerWindow(on_gpu=False)
    again.start()
    torch.ones(2) + 1
    assert again.stop() is not None
    assert again.obstacle == ""


def test_flops_are_unknown_where_a_cuda_graph_runs() -> None:
    launch = Event(name="cudaGraphLaunch", begin=0, end=1e-3)
    recording = Recording(events=(*RECORDING.events, launch), steps=1)
    found = windows(recording=recording, profiled_seconds=[5e-3], follower=OperatorFollower()).profile()
    assert found.flops is None
    assert found.reasons["flops"] == found.reasons["lines"] == GRAPHED


def test_code_that_was_typed_in_has_no_lines_and_a_reason() -> None:
    with OperatorFollower() as follower:
        torch.ones(2) + 1
    follower.operators[:] = [replace(one, origin=Origin()) for one in follower.operators]  # this file is none of it
    found = windows(recording=RECORDING, profiled_seconds=[5e-3], follower=follower).profile()
    assert found.reasons["lines"] == NO_FILE
