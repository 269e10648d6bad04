"""Five steps of examples/digits_cnn.py as torch's profiler recorded them on an NVIDIA H200, through a profile."""

from __future__ import annotations

import functools
import gzip
import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flatout.profiling.profile import Profile
from flatout.profiling.recorded_events import Recording, links_of, recorded
from flatout.profiling.window import Windows

RECORDED = Path(__file__).with_name("h200_digits_cnn.json.gz")
SPANS = {"data": 0.34e-3, "forward": 0.5e-3, "backward": 1.03e-3, "optimizer": 0.2e-3, "sync": 0.04e-3}


def function_events() -> list[Any]:
    """As torch 2.11 returns them: nested by time within a thread, without the operator's number."""
    document = json.loads(gzip.decompress(RECORDED.read_bytes()))
    events, threads = [], defaultdict(list)
    for name, start, duration, device, label, number, linked, thread in document["events"]:
        one = SimpleNamespace(
            name=document["names"][name],
            time_range=SimpleNamespace(start=start, end=start + duration),
            device_type=f"DeviceType.{device}",
            id=number,
            linked=linked,
            is_async=False,
            is_user_annotation=bool(label),
            cpu_parent=None,
            input_shapes=(),
            scope=0,
            kernels=[],
        )
        events.append(one)
        if device == "CPU":
            threads[thread].append(one)
    for own in threads.values():
        around: list[Any] = []
        for one in sorted(own, key=lambda event: (event.time_range.start, -event.time_range.end)):
            while around and one.time_range.end > around[-1].time_range.end:
                around.pop()
            one.cpu_parent = around[-1] if around else None
            around.append(one)
    operators = {one.id: one for own in threads.values() for one in own if not one.linked}
    for one in events:
        if one.device_type == "DeviceType.CUDA" and one.linked in operators:
            operators[one.linked].kernels.append(SimpleNamespace(duration=one.time_range.end - one.time_range.start))
    return events


@functools.cache
def recording() -> Recording:
    events = function_events()
    raw = [
        SimpleNamespace(
            device_type=lambda one=one: one.device_type,
            correlation_id=lambda one=one: one.id,
            linked_correlation_id=lambda one=one: one.linked,
            name=lambda one=one: one.name,
        )
        for one in events
    ]
    steps = sum(one.name == "ProfilerStep" and one.device_type == "DeviceType.CPU" for one in events)
    return recorded(events, steps=steps, links=links_of(raw))


def profiled(step_seconds: float) -> Profile:
    return Windows(
        name="digits_cnn.py",
        device="cuda:0",
        step_kind="optimizer",
        asked=5,
        recording=recording(),
        timed_seconds=[step_seconds],
        profiled_seconds=[4.6e-3] * 5,
        spans=SPANS,
    ).profile()


def test_every_kernel_belongs_to_an_operator_of_its_step() -> None:
    found = recording()
    assert (found.steps, found.left_out) == (5, 0)
    assert len(found.kernels) == 5 * 62
    assert all(one.operator is not None for one in found.kernels)


def test_parts_add_up_to_the_step() -> None:
    found = profiled(3.15e-3)
    assert found.parts is not None
    assert found.parts.total == pytest.approx(3.15e-3)
    assert found.parts.data == pytest.approx(SPANS["data"])
    assert found.parts.idle > 0.75 * 3.15e-3
    assert (found.launches, "operators" in found.reasons) == (62, False)
    assert {one.operator for one in found.kernels} >= {"aten::convolution_backward", "aten::cudnn_convolution"}


def test_such_small_steps_wait_for_their_host_and_not_for_reads() -> None:
    causes = {one.cause: one.seconds for one in profiled(3.15e-3).idle_causes}
    assert causes["host late"] > 10 * causes.get("sync", 0.0)
    assert causes["host late"] > 10 * causes.get("copies", 0.0)
