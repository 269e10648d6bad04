"""`flatout.profile` and `flatout.measure` of functions."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import flatout
from flatout.errors import UsageError
from flatout.profiling import callables
from flatout.profiling.profile import Profile
from flatout.profiling.window import NO_OPERATORS


@pytest.fixture(autouse=True)
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callables, "MOST_TIMED", 5)


def test_a_training_step(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    batch = torch.randn(8, 16)

    def step() -> None:
        model(batch).sum().backward()

    found = flatout.profile(step, steps=2, trace=tmp_path / "trace.json")
    assert (found.name, found.steps, found.timed_steps, found.device) == ("step", 2, 5, "cpu")
    assert found.flops == 3 * 2 * 8 * (16 * 32 + 32 * 4) - 2 * 8 * 16 * 32
    assert found.step_seconds is not None
    assert found.parts is not None
    assert found.parts.total == pytest.approx(found.step_seconds)
    assert "samples_per_step" in found.reasons
    assert {row.phase for row in found.operators} >= {"forward", "backward"}
    (place,) = {row.line for row in found.operators if row.flops}  # of the module's caller
    assert place.startswith(("tests/application/test_profile.py:", __file__))
    assert any("model(batch)" in row.text for row in found.lines)
    assert [row.path for row in found.modules] == ["Sequential", "Sequential.0", "Sequential.1", "Sequential.2"]
    assert str(found) == found.summary()
    assert "verdict" in found.summary(by="line", sort="calls")
    assert Profile.from_json(json.loads(json.dumps(found.to_json()))).operators == found.operators
    assert "traceEvents" in json.loads((tmp_path / "trace.json").read_text())


@pytest.mark.slow
def test_torchs_profiler_logs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own: what it is told counts where it is used for the first time."""
    monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
    code = "import flatout, torch; print(flatout.profile(lambda: torch.ones(9) + 1, steps=1).steps)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("1\n", "")


def test_a_callable_without_operators_has_ended_no_script() -> None:
    found = flatout.profile(lambda: None, steps=1)
    assert found.reasons["parts"] == NO_OPERATORS
    assert found.step_seconds is not None
    assert "script" not in found.summary()


def test_an_error_passes_and_leaves_nothing_on() -> None:
    calls = []

    def fail() -> None:
        calls.append(1)
        if len(calls) == 10:  # under the profiler: 3 to warm up, 5 timed, 1 followed
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        flatout.profile(fail)
    assert flatout.profile(lambda: torch.ones(2) + 1, steps=1).operators  # it can start again


def test_a_function_without_torch_has_no_operators() -> None:
    found = flatout.profile(lambda: sum(range(100)), steps=1)
    assert (found.operators, found.flops) == ((), 0)
    assert found.step_seconds is not None
    assert "verdict" in str(found)


def test_wrong_arguments(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"for a script: flatout profile train\.py"):
        flatout.profile("train.py")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="steps"):
        flatout.profile(lambda: None, steps=0)
    with pytest.raises(UsageError, match="its name ends with"):
        flatout.profile(lambda: None, trace=tmp_path / "trace.txt")
    with pytest.raises(UsageError, match="it is called without arguments"):
        flatout.measure(3)  # type: ignore[arg-type]


def test_measure_knows_its_interval() -> None:
    found = flatout.measure(lambda: torch.ones(8) + 1, name="addition", max_seconds=5)
    assert found.name == "addition"
    assert len(found.warmup_seconds) == 3
    assert len(found.samples_seconds) >= 10
    interval = found.interval_seconds
    assert interval is not None
    assert interval[0] <= found.median_seconds <= interval[1]
    assert found.machine_fingerprint
