"""`flatout.profile` and `flatout.measure` of functions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import flatout
from flatout.errors import UsageError
from flatout.profiling import callables
from flatout.profiling.profile import Profile
from flatout.profiling.window import COMPILED, NO_OPERATORS, OTHERS_PROFILER
from flatout.torch_private.dispatch import current_dispatch_mode


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


def test_compiled_code_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(4, 4)
    followed = []

    def call() -> None:
        followed.append(current_dispatch_mode() is not None)
        with torch.profiler.record_function("Torch-Compiled Region: 0/0"):
            x @ x

    monkeypatch.setattr(callables, "compile_was_asked_for", lambda: True)
    found = flatout.profile(call, steps=1)
    assert not any(followed)
    assert (found.flops, found.modules) == (None, ())
    assert found.reasons["flops"] == found.reasons["lines"] == COMPILED
    plain = flatout.profile(lambda: x @ x, steps=1)  # beside compiled code, and none itself
    assert plain.flops == 128


def test_a_profiler_in_the_function_goes_first_and_a_trace_that_is_missing_is_said(tmp_path: Path) -> None:
    def call() -> None:
        with torch.autograd.profiler.profile():
            torch.ones(2) + 1

    found = flatout.profile(call, steps=1, trace=tmp_path / "trace.json")
    assert (found.steps, found.operators) == (0, ())
    assert found.reasons["operators"] == OTHERS_PROFILER
    assert any("no trace was written: the script runs a profiler of its own" in note for note in found.notes)
    assert not (tmp_path / "trace.json").exists()


def test_a_trace_goes_where_it_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    flatout.profile(lambda: os.chdir(tmp_path / "elsewhere"), steps=1, trace="trace.json")
    assert (tmp_path / "trace.json").exists()


def test_a_newer_switch_of_precision_is_no_error() -> None:
    backends: Any = torch.backends
    with backends.flags(fp32_precision="bf16"):
        assert flatout.profile(lambda: torch.ones(2) + 1, steps=1).operators


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
    for call in (flatout.measure, flatout.profile):
        with pytest.raises(UsageError, match=r"function is <lambda>\(batch\); it is called without arguments"):
            call(lambda batch: batch)  # type: ignore[misc, arg-type]


def test_measure_knows_its_interval() -> None:
    found = flatout.measure(lambda: torch.ones(8) + 1, name="addition", max_seconds=5)
    assert found.name == "addition"
    assert len(found.warmup_seconds) == 3
    assert len(found.samples_seconds) >= 10
    interval = found.interval_seconds
    assert interval is not None
    assert interval[0] <= found.median_seconds <= interval[1]
    assert found.machine_fingerprint
