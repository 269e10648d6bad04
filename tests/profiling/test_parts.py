"""The parts of a step add up to it."""

from __future__ import annotations

from typing import Any

import pytest

from flatout.profiling.attribution import Attributed
from flatout.profiling.parts import idle_causes, parts_by_operators, parts_on_cpu, parts_on_gpu
from flatout.profiling.profile import OperatorRow, StepParts, WaitRow

SPANS = {"data": 0.1, "transfer": 0.0, "forward": 0.3, "backward": 0.4, "optimizer": 0.1, "sync": 0.05, "other": 0.05}


def attributed(**values: Any) -> Attributed:
    return Attributed(operators=(), calls=0, by_name_share=0, unknown_share=0, **values)


def test_on_a_cpu_they_are_the_spans() -> None:
    parts = parts_on_cpu(SPANS, communication=0.15)
    assert parts.total == pytest.approx(1.0)
    assert (parts.data, parts.backward, parts.communication, parts.idle) == (0.1, pytest.approx(0.25), 0.15, 0.0)
    assert parts.other == pytest.approx(0.1)


def test_on_a_gpu_what_no_kernel_fills_is_idle() -> None:
    busy = {"forward": 0.2, "backward": 0.3, "copies": 0.05, "evaluation": 0.05}
    parts = parts_on_gpu(SPANS, busy, 1.0)
    assert parts.total == pytest.approx(1.0)
    assert (parts.forward, parts.copies, parts.data, parts.other) == (0.2, 0.05, 0.1, 0.05)
    assert parts.idle == pytest.approx(0.3)
    waits = (WaitRow(operator="aten::_local_scalar_dense", line="train.py:3", calls=2, seconds=0.2),)
    causes = idle_causes(
        parts, attributed(launches=120, waits=waits, waiting_cost_seconds=0.05, copying_cost_seconds=0.03)
    )
    assert [cause.cause for cause in causes] == ["host late", "loader", "sync", "copies"]
    assert "2 times a step, 200 ms" in causes[2].evidence
    assert sum(cause.seconds for cause in causes) == pytest.approx(parts.idle + parts.data)
    assert "120 kernels" in causes[0].evidence


def test_kernels_that_overlap_never_exceed_the_step() -> None:
    parts = parts_on_gpu(SPANS, {"forward": 1.5, "backward": 1.5}, 1.0)
    assert (parts.total, parts.forward, parts.idle) == (pytest.approx(1.0), 0.5, 0.0)
    assert idle_causes(parts, attributed(launches=1, waiting_cost_seconds=0.1)) == ()


def test_of_a_callable_the_rest_is_other() -> None:
    rows = [
        OperatorRow(
            name="aten::mm",
            operator_class="matmul",
            calls=1,
            seconds=seconds,
            host_seconds=seconds,
            device="cpu",
            phase=phase,
        )
        for phase, seconds in (("forward", 0.2), ("evaluation", 0.1), ("other", 0.1))
    ]
    parts = parts_by_operators(rows, 1.0)
    assert (parts.total, parts.forward, parts.other) == (
        pytest.approx(1.0),
        pytest.approx(0.3),
        pytest.approx(0.7),
    )
    assert isinstance(parts, StepParts)
