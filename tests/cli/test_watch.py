"""`flatout watch` on recorded folders of runs, and `flatout run` beside it."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flatout.cli import watch as watch_verb
from flatout.cli.main import main
from flatout.errors import UsageError
from tests.live_states import FINDING, HOSTILE, run_state

FORMATS = Path(__file__).parents[1] / "recorded" / "formats"


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "runs"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("FLATOUT_RUNS_DIR", str(folder))
    monkeypatch.setattr(watch_verb, "REFRESH_SECONDS", 0.0)
    return folder


@pytest.fixture
def plant(runs: Path) -> Callable[..., Path]:
    def plant(name: str, **changes: Any) -> Path:
        folder = runs / name
        folder.mkdir(exist_ok=True)
        header = {"document": "run-state", "schema": 1, "version": "0.1.0"}
        (folder / "state.json").write_text(json.dumps({"flatout": header, **run_state(**changes).to_json()}))
        return folder

    return plant


def test_nothing_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("runs      none: flatout run is not running here")
    assert "\nCPU       " in shown
    assert "\nGPU" in shown


@pytest.mark.parametrize("what", ["a file", "open to others"])
def test_a_folder_in_which_no_run_can_be_listed_is_said(
    what: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.chmod(0o777)
    if what == "a file":
        runs.rmdir()
        runs.write_text("")
    assert main(["watch"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"runs      unknown: {runs}: it is not a folder of this user's alone; ")
    assert "none" not in shown.splitlines()[0]
    assert main(["watch", "--json"]) == 0
    assert "not a folder" in json.loads(capsys.readouterr().out)["runs_unknown_because"]
    with pytest.raises(UsageError, match=r"process 123 .* it is not a folder of this user's alone"):
        main(["watch", "123"])


def test_a_time_beyond_the_calendar_is_unknown(plant: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    plant("run-1-1", ended=True, written_at=1e300)
    assert main(["watch"]) == 0
    assert "ended at an unknown time" in capsys.readouterr().out


def test_runs_are_listed_with_what_became_of_them(
    plant: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    plant("run-1-1", started_at=3.0, script="goes_on.py")
    plant("run-2-1", started_at=2.0, script="done.py", ended=True, status=0)
    plant("run-3-1", started_at=1.0, script="killed.py", pid=4194305, process_started="1")
    assert main(["watch"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"run       goes_on.py · process {os.getpid()}, for ")
    assert lines[0].endswith("step 1,234 · 12.5 ms a step")
    assert "done.py · ended at " in lines[1]
    assert "killed.py · its process 4194305 is gone and wrote no end: killed after " in lines[2]
    assert lines[3] == "          to follow one: flatout watch PID"


def test_one_run_by_its_folder_and_by_its_process(
    plant: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = plant("run-1-1", findings=(FINDING,), script=HOSTILE)
    assert main(["watch", str(folder)]) == 0
    by_folder = capsys.readouterr().out
    assert main(["watch", str(os.getpid())]) == 0
    for shown in (by_folder, capsys.readouterr().out):
        assert "\x1b" not in shown
        assert "\x07" not in shown
        assert "progress  step 1,234 · epoch 3, step 120 of 500, 4.75 s left" in shown
        assert "finding   the model waits for data: 34% of a step" in shown


def test_processes_below_a_run(plant: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    folder = plant("run-1-1")
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert main(["watch", str(folder)]) == 0
    child.communicate(b"\n")
    shown = capsys.readouterr().out
    assert re.search(rf"process {child.pid} python\S*: [\d.]+ [KM]iB resident, [\d.]+ \S+ of CPU time", shown)


def test_no_such_run_is_one_line_and_exit_code_2() -> None:
    with pytest.raises(UsageError, match="process 1234 is no `flatout run` of yours") as refused:
        main(["watch", "1234"])
    assert refused.value.exit_code == 2


def test_the_document(plant: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    plant("run-1-1")
    assert main(["watch", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["flatout"]["document"] == "watch"
    assert [one["condition"] for one in found["runs"]] == ["running"]
    assert found["runs"][0]["state"]["steps"] == 1234
    assert found["devices"]["reading"]["cpu"]["memory_total_bytes"] > 0
    assert found["energy"] is None
    assert main(["watch", "--json", str(os.getpid())]) == 0
    energy = json.loads(capsys.readouterr().out)["energy"]
    assert energy["joules_per_step"] is not None or energy["unknown_because"]


def test_a_recorded_state_is_read(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "run-1-1").mkdir()
    shutil.copy(FORMATS / "run-state-1.json", runs / "run-1-1" / "state.json")
    assert main(["watch", str(runs / "run-1-1")]) == 0
    assert "step 1,234" in capsys.readouterr().out


def test_on_a_terminal_it_follows_until_the_run_has_ended(
    plant: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = plant("run-1-1", script="train.py")
    asked: list[float] = []

    def sleep(seconds: float) -> None:
        asked.append(seconds)
        plant("run-1-1", script="train.py", steps=1300 + len(asked), ended=len(asked) > 1, status=0)

    monkeypatch.setattr(watch_verb.time, "sleep", sleep)
    shown = on_a_terminal(monkeypatch, "xterm", folder)
    assert len(asked) == 2
    assert b"step 1,301" in shown
    assert b"step 1,302" in shown
    assert b"with status 0" in shown


def test_on_a_terminal_without_a_cursor_it_is_shown_once(
    plant: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = on_a_terminal(monkeypatch, "dumb", plant("run-1-1"))
    assert b"step 1,234" in shown
    assert b"\x1b" not in shown


def on_a_terminal(monkeypatch: pytest.MonkeyPatch, kind: str, folder: Path) -> bytes:
    """What `flatout watch FOLDER` shows there."""
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setenv("TERM", kind)
        assert main(["watch", str(folder)]) == 0
        terminal.flush()
        shown = b""
        while select.select([master], [], [], 0)[0]:
            shown += os.read(master, 1 << 16)
    os.close(master)
    return shown
