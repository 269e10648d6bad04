"""`flatout profile` as a new user meets it."""

from __future__ import annotations

import csv
import gzip
import importlib.util
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from flatout.errors import UsageError
from flatout.profiling.profile import Profile
from tests.cli.in_process import Said, said_by

pytestmark = pytest.mark.usefixtures("forked_trials")

LOOP = """
import torch
from torch import nn
from torch.utils.data import DataLoader
torch.set_num_threads(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 128), nn.Linear(128, 8)

    def forward(self, x):
        hidden = torch.relu(self.first(x))
        return self.last(hidden)


model = Net()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader = DataLoader([(torch.randn(64), 1) for _ in range(64)], batch_size=32)
steps = 0
while steps < {steps}:
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        steps += 1
        {body}
        if steps == {steps}:
            break
"""


def profile(folder: Path, *words: str) -> Said:
    return said_by(folder, "profile", *words)


def write(folder: Path, name: str = "train.py", *, steps: int = 100_000, body: str = "pass") -> None:
    (folder / name).write_text(LOOP.format(steps=steps, body=body))


def document(result: Said) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result.stdout)
    assert found["flatout"]["document"] == "profile"
    return found


def line_of(folder: Path, text: str) -> int:
    lines = (folder / "train.py").read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def test_one_screen_and_every_export(tmp_path: Path) -> None:
    write(tmp_path, body="print('noise')")
    result = profile(tmp_path, "--trace", "trace.json.gz", "--operators", "table.csv", "--by", "shape", "train.py")
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert len(lines) <= 45
    assert "noise" not in lines
    assert lines[0].startswith("script     train.py · 5 steps profiled, ")
    assert "samples/s" in lines[0]
    assert lines[1].startswith("verdict    ")
    assert "parts      " in result.stdout
    assert f"train.py:{line_of(tmp_path, 'self.first(x)')}" in result.stdout
    trace = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))
    names = [event.get("name", "") for event in trace["traceEvents"]]
    assert sum(name.startswith("ProfilerStep#") for name in names) >= 5
    assert "aten::addmm" in names
    with open(tmp_path / "table.csv", newline="") as file:
        assert any(row["name"] == "aten::addmm" and row["shapes"] for row in csv.DictReader(file))


@pytest.mark.slow
def test_the_document(tmp_path: Path) -> None:
    write(tmp_path)
    result = profile(tmp_path, "--json", "--steps", "3", "train.py", "--its", "own")
    found = document(result)
    assert found["script"]["arguments"] is None
    assert found["observed"]["step_kind"] == "optimizer"
    seen = Profile.from_json(found["profile"])
    assert (seen.steps, seen.device, seen.samples_per_step, seen.tokens_per_step) == (3, "cpu", 32, None)
    assert seen.timed_steps >= 5
    assert seen.parts is not None
    assert seen.step_seconds is not None
    assert seen.parts.total == pytest.approx(seen.step_seconds, rel=1e-6)
    forward = 2 * 32 * (64 * 128 + 128 * 8)
    assert seen.flops == 3 * forward - 2 * 32 * 64 * 128  # no gradient of the input
    assert sum(row.flops or 0 for row in seen.operators) == pytest.approx(seen.flops)
    by_line = {row.line: row for row in seen.operators_by("line")}
    assert by_line[f"train.py:{line_of(tmp_path, 'self.first(x)')}"].flops == 2 * 2 * 32 * 64 * 128
    assert {row.path for row in seen.modules} == {"Net", "Net.first", "Net.last"}
    assert next(row for row in seen.modules if row.path == "Net.first").backward_seconds
    assert {row.phase for row in seen.operators} >= {"data", "forward", "backward", "optimizer"}
    assert seen.lines[0].text
    assert any(row.operator_class == "matmul" and row.dtype == "fp32" for row in seen.roofline)


@pytest.mark.slow
def test_nothing_of_the_users_is_touched(tmp_path: Path) -> None:
    write(tmp_path, body="open('log.txt', 'a').write('x'); open('new.txt', 'w')")
    (tmp_path / "log.txt").write_text("mine")
    assert profile(tmp_path, "train.py").returncode == 0
    assert (tmp_path / "log.txt").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.txt", "train.py"]


@pytest.mark.parametrize("steps", [*(pytest.param(n, marks=pytest.mark.slow) for n in (2, 9)), 4])
@pytest.mark.slow
def test_a_script_that_ends_early_is_profiled_on_what_there_is(tmp_path: Path, steps: int) -> None:
    write(tmp_path, steps=steps)
    result = profile(tmp_path, "--json", "train.py")
    assert result.returncode == 0
    seen = Profile.from_json(document(result)["profile"])
    assert 1 <= seen.steps < steps
    assert seen.timed_steps >= (steps > 2)
    assert seen.operators
    if seen.steps < 5:
        assert f"{seen.steps} of the 5 asked for were profiled, in a second run of it" in " ".join(seen.notes)


def test_a_script_without_steps(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\nprint(torch.ones(2))\n")
    result = profile(tmp_path, "--trace", "trace.json", "train.py")
    assert result.returncode == 0
    assert "no training step found" in result.stdout
    assert "flatout: trace.json was not written: no step was profiled" in result.stderr
    assert document(profile(tmp_path, "--json", "train.py"))["profile"] is None


def test_a_script_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # not forked from a process that has loaded torch
    (tmp_path / "train.py").write_text("print('done')\n")
    result = profile(tmp_path, "train.py")
    assert result.returncode == 0
    assert "no training step found" in result.stdout


def test_a_script_that_fails_shows_its_traceback(tmp_path: Path) -> None:
    write(tmp_path, body="if steps == 6: raise ValueError('at step 6')")
    result = profile(tmp_path, "--json", "train.py")
    assert result.returncode == 1
    assert result.stderr.endswith("ValueError: at step 6\n")
    assert "flatout" not in result.stderr
    found = document(result)
    assert (found["steps"], found["script"]["status"]) == (6, 1)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["missing.py"], 2, "no such script: missing.py"),
        (["--steps", "0", "train.py"], 2, "at least 1"),
        (["--by", "colour", "train.py"], 2, "not one of 'name', 'shape', 'line'"),
        (["--trace", "trace.txt", "train.py"], 2, "its name ends with .json, .json.gz"),
        (["--operators", "absent/table.csv", "train.py"], 2, "cannot write"),
        (["--tensorboard", "train.py", "train.py"], 2, "train.py is a file"),
        (["--tensorboard", "train.py/logs", "train.py"], 2, "cannot write to train.py/logs"),
        (["syntax.py"], 1, "syntax.py, line 2: SyntaxError"),
        (["raises.py"], 1, "ValueError: before any step"),
        ([], 2, "--help"),
    ],
)
def test_bad_input_is_named(tmp_path: Path, words: list[str], code: int, said: str) -> None:
    write(tmp_path)
    (tmp_path / "syntax.py").write_text("x = 1\ny = = 2\n")
    (tmp_path / "raises.py").write_text("import torch\nraise ValueError('before any step')\n")
    before = sorted(tmp_path.iterdir())
    result = profile(tmp_path, *words)
    assert (result.returncode, result.stdout) == (code, "")
    assert said in result.stderr
    assert "flatout/" not in result.stderr
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.slow
def test_a_script_that_never_steps_is_ended(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch, time\ntime.sleep(600)\n")
    result = profile(tmp_path, "--patience", "1s", "train.py")
    assert result.returncode == 1
    assert "did not take the steps of a profile in 1 s" in result.stderr


@pytest.mark.slow
def test_tensorboard_is_refused_before_the_run_or_written(tmp_path: Path) -> None:
    write(tmp_path)
    result = profile(tmp_path, "--tensorboard", "logs", "train.py")
    if importlib.util.find_spec("tensorboard") is None:
        assert (result.returncode, result.stdout) == (1, "")
        assert "pip install tensorboard" in result.stderr
        return
    assert result.returncode == 0
    names = [path.name for path in (tmp_path / "logs").iterdir()]
    assert any(name.endswith(".pt.trace.json.gz") for name in names)
    assert any("tfevents" in name for name in names)


@pytest.mark.slow
def test_an_export_that_fails_comes_after_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handlers = []

    def full(path: Path, *rest: object) -> None:
        handlers.append(signal.getsignal(signal.SIGTERM))
        raise UsageError(f"cannot write {path}: No space left on device")

    write(tmp_path)
    monkeypatch.setattr("flatout.profiling.exports.write_trace", full)
    result = profile(tmp_path, "--trace", "trace.json", "--operators", "table.csv", "--json", "train.py")
    assert result.returncode == 2
    assert document(result)["profile"]["operators"]
    assert "trace.json: No space left on device" in result.stderr
    assert (tmp_path / "table.csv").exists()
    assert all(map(callable, handlers))  # a signal would leave no folder behind


@pytest.mark.slow
def test_names_in_a_script_stay_inert(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "Evil = type('Evil<script>\\x1b[2J', (torch.nn.Module,), {'forward': lambda self, x: self.inner(x)})\n"
        "model = Evil()\n"
        "model.add_module('inner', torch.nn.Linear(4, 4))\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "while True:\n"
        "    model(torch.ones(2, 4)).sum().backward()  # \x1b[31m\n"
        "    optimizer.step()\n"
    )
    result = profile(tmp_path, "train.py")
    assert result.returncode == 0
    assert "\x1b" not in result.stdout
    assert "Evil<script>" in result.stdout


@pytest.mark.slow
def test_a_script_with_a_profiler_of_its_own(tmp_path: Path) -> None:
    write(tmp_path)
    source = (tmp_path / "train.py").read_text()
    start = "profiler = torch.profiler.profile()\nprofiler.start()\nmodel = Net()"
    (tmp_path / "train.py").write_text(source.replace("model = Net()", start))
    seen = Profile.from_json(document(profile(tmp_path, "--json", "train.py"))["profile"])
    assert (seen.steps, seen.operators) == (0, ())
    assert "a profiler of its own" in seen.reasons["operators"]
    assert seen.parts is not None


@pytest.mark.slow
def test_a_script_that_starts_a_profiler_during_the_steps(tmp_path: Path) -> None:
    write(tmp_path, body="with torch.autograd.profiler.profile(): x + 1")
    result = profile(tmp_path, "--json", "--trace", "trace.json", "train.py")
    assert result.returncode == 0
    seen = Profile.from_json(document(result)["profile"])
    assert (seen.steps, seen.operators) == (0, ())
    assert seen.step_seconds is not None
    assert "a profiler of its own" in seen.reasons["operators"]
    assert "trace.json was not written: the script runs a profiler of its own" in result.stderr


@pytest.mark.slow
def test_many_operators_in_a_step_keep_the_files_small(tmp_path: Path) -> None:
    write(tmp_path, body="for _ in range(2000): x = x + 1")
    result = profile(tmp_path, "--trace", "trace.json.gz", "--json", "--steps", "2000", "train.py")
    assert result.returncode == 0
    assert (tmp_path / "trace.json.gz").stat().st_size < 20e6
    assert len(result.stdout) < 2e6
    seen = Profile.from_json(document(result)["profile"])
    assert 1 <= seen.steps < 10
    assert any("of the 2000 steps asked for were profiled" in note for note in seen.notes)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--loss", "sum"), "--loss without --devices"),
        (("--allow-local-batchnorm",), "--allow-local-batchnorm without --devices"),
        (("--devices", "1"), "--devices 1; one device is a plain profile"),
        (("--devices", "x"), "--devices is 'x'"),
        (("--devices", "2", "--isolation", "guard"), "--isolation guard with --devices"),
    ],
)
def test_options_of_several_devices_that_contradict_others(options: tuple[str, ...], said: str, tmp_path: Path) -> None:
    write(tmp_path)
    found = profile(tmp_path, *options, "train.py")
    assert found.returncode == 2
    assert said in found.stderr
