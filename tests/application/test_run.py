"""`flatout.run`: a script in a process of its own, and what comes back of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import flatout
from flatout.application.run import _done
from flatout.errors import PlanError, UsageError
from flatout.machine.detect import detect
from flatout.script.child_command import child_command
from tests.processes import Python

TRAIN = """
import os, sys, time, torch
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(40):
    optimizer.zero_grad()
    (model(torch.randn(8, 4)) ** 2).mean().backward()
    optimizer.step()
    time.sleep(0.005)
print("trained", sys.argv[1:])
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(flatout.__file__).parents[1]))
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch, python: Python) -> None:
    """The processes of `flatout.run` are forked from one that has loaded torch."""

    def done(words: Sequence[str], capture_output: bool) -> subprocess.CompletedProcess[str]:
        command = child_command("flatout", "run", *words)
        ended = python(*command[1:], cwd=Path.cwd())
        return ended if capture_output else subprocess.CompletedProcess(command, ended.returncode)

    monkeypatch.setattr("flatout.application.run._done", done)


@pytest.mark.slow
def test_a_script_is_run_in_a_new_process(folder: Path) -> None:
    check_a_run_by_a_plan(folder)


@pytest.mark.usefixtures("forked")
@pytest.mark.slow
def test_a_script_is_run_by_a_plan_and_nothing_is_written_beside_it(folder: Path) -> None:
    check_a_run_by_a_plan(folder)


def check_a_run_by_a_plan(folder: Path) -> None:
    machine = detect()
    plan = flatout.Plan(
        optimizer="fused",
        memory_format="channels_last",
        machine_fingerprint=machine.fingerprint,
        torch_version=machine.versions.torch,
    )
    ran = flatout.run(Path("train.py"), ["--lr", "0.1"], plan=plan, capture_output=True)
    assert (ran.status, ran.ok, ran.stdout) == (0, True, "trained ['--lr', '0.1']\n"), ran.stderr
    assert ran.steps == 40
    assert ran.step_seconds is not None
    assert ran.step_seconds > 0.001
    assert ran.document is not None
    assert ran.document["load"]["own_cores"] > 0
    assert ran.measurement is not None
    assert ran.measurement.contended is not None
    assert ran.peak_resident_bytes is not None
    assert ran.peak_resident_bytes > 10 << 20
    assert len(ran.applied) == 1
    (missed,) = ran.not_applied
    assert "channels_last" in missed.choice
    assert missed.reason == "the model has no 2-d convolutions"
    assert ran.to_json()["plan"] == plan.choices()
    assert [entry.name for entry in folder.iterdir()] == ["train.py"]
    plain = flatout.run("train.py", plan=plan, without=["optimizer", "memory_format"], report="out.json")
    assert (plain.status, plain.applied, plain.stdout) == (0, (), None)
    assert (folder / "out.json").exists()


def test_a_script_that_fails_is_a_result(folder: Path) -> None:
    (folder / "fails.py").write_text("raise ValueError('mine')")
    ran = flatout.run("fails.py", capture_output=True)
    assert (ran.status, ran.ok, ran.steps, ran.step_seconds) == (1, False, 0, None)
    assert "ValueError: mine" in (ran.stderr or "")
    assert [finding.name for finding in ran.findings] == ["no-step"]
    (folder / "killed.py").write_text(f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})")
    (folder / "old.json").write_text("{}")
    killed = flatout.run("killed.py", report="old.json", capture_output=True)
    assert (killed.status, killed.steps, killed.document) == (128 + signal.SIGKILL, None, None)


@pytest.mark.parametrize("capture_output", [True, False])
def test_an_interrupted_script_may_finish(folder: Path, monkeypatch: pytest.MonkeyPatch, capture_output: bool) -> None:
    """Ctrl-C in a terminal also interrupts the script, which may save a checkpoint; we are interrupted as we wait."""
    wait, interrupts = subprocess.Popen.communicate, iter([KeyboardInterrupt()])

    def interrupted_once(process: Any, *args: Any, **kwargs: Any) -> Any:
        for interrupt in interrupts:
            raise interrupt
        return wait(process, *args, **kwargs)

    saves = "import time\ntime.sleep(0.5)\nopen('saved', 'w').close()\n"
    monkeypatch.setattr("flatout.application.run.child_command", lambda *_: [sys.executable, "-c", saves])
    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted_once)
    with pytest.raises(KeyboardInterrupt):
        _done([], capture_output)
    assert (folder / "saved").exists()


def test_a_report_may_go_nowhere(folder: Path) -> None:
    (folder / "ends.py").write_text("print(1)")
    ran = flatout.run("ends.py", report=os.devnull, capture_output=True)
    assert (ran.status, ran.stdout, ran.document) == (0, "1\n", None)


def test_a_module_is_run_as_python_does(folder: Path) -> None:
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").write_text("")
    (folder / "package" / "job.py").write_text("import sys; print(__package__, sys.argv[1:]); sys.exit(7)")
    ran = flatout.run("package.job", ["-x"], module=True, plan=flatout.Plan(), capture_output=True)
    assert (ran.status, ran.stdout) == (7, "package ['-x']\n")


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"script": "nowhere.py"}, UsageError, "no such script: nowhere.py"),
        ({"script": "."}, UsageError, "is a folder"),
        ({"script": "no.such.module", "module": True}, UsageError, "No module named no"),
        ({"script": "os.path.deeper", "module": True}, UsageError, "No module named os.path"),
        ({"arguments": "--lr 1"}, UsageError, "it is a list of words"),
        ({"arguments": [1]}, UsageError, "each of them is a text"),
        ({"without": "compile"}, UsageError, r"write \['compile'\]"),
        ({"without": ["compilation"]}, PlanError, "a plan has no choice 'compilation'"),
        ({"plan": "none.toml"}, UsageError, "no plan at none.toml"),
        ({"plan": {"threads": 1}}, PlanError, "it is a flatout.Plan or None"),
        ({"plan": flatout.Plan(weights="int8")}, PlanError, "weights is 'int8'; flatout run does not apply it"),
        ({"device": "cuda:99"}, UsageError, "device is 'cuda:99'"),
        ({"report": "missing/run.json"}, UsageError, "cannot write"),
    ],
)
def test_what_cannot_be_run_is_an_error_before_anything_starts(
    given: dict[str, Any], error: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flatout.application.run._done", lambda *_: pytest.fail("it was started"))
    with pytest.raises(error, match=said):
        flatout.run(**{"script": "train.py", **given})


def test_nothing_of_a_package_is_imported_to_find_its_module(folder: Path) -> None:
    (folder / "loud").mkdir()
    (folder / "loud" / "__init__.py").write_text("open('imported', 'w')")
    with pytest.raises(UsageError, match=r"No module named loud\.quiet"):
        flatout.run("loud.quiet", module=True)
    assert not os.path.exists("imported")
