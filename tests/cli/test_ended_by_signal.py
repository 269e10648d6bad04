"""Verbs that start trials, ended from outside: no process stays, and no folder for longer than needed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flatout.script import work_folder
from flatout.signals import signals_as_exits

SCRIPT = """
import subprocess, sys, time
subprocess.Popen(["sleep", "1000"], start_new_session=True)
for stream in (sys.stdout, sys.stderr):
    print("begun", file=stream, flush=True)
time.sleep(1000)
"""
FROM_ELSEWHERE = """schema = 2
[plan]
threads = 1
[provenance]
script = "train.py"
machine_fingerprint = "elsewhere"
"""
PARENT = Path("/var/tmp")
PATIENCE_SECONDS = 200.0


def ended(folder: Path, verb: str, number: int) -> tuple[int, Path, str, int]:
    """(exit code, its work folder, stderr, its number) of a verb that got the signal while its script was running."""
    (folder / "train.py").write_text(SCRIPT)
    (folder / "flatout.toml").write_text(FROM_ELSEWHERE)  # `run` verifies it first
    command = [sys.executable, "-m", "flatout", *verb.split(), "train.py"]
    with subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True) as process:
        try:
            work = running(process.pid)
            process.send_signal(number)
            _, errors = process.communicate(timeout=PATIENCE_SECONDS)
        finally:
            process.kill()
    return process.returncode, work, errors, process.pid


def running(owner: int) -> Path:
    """The work folder of a process, once the script in it has printed something."""
    end = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < end:
        with contextlib.suppress(OSError):  # just removed
            for work in filter(Path.is_dir, opened_by(owner)):
                if work.name.startswith(work_folder.PREFIX):
                    logs = "".join(log.read_text() for log in [*work.glob("*.log"), *work.glob("*/*.log")])
                    if "begun" in logs:
                        return work
        time.sleep(0.02)
    raise AssertionError("the script was not started")


def opened_by(process: int | str) -> list[Path]:
    return [Path(os.readlink(link)) for link in Path(f"/proc/{process}/fd").iterdir()]


def users_of(folder: Path) -> Iterator[str]:
    """Processes that were started with a file in it, or write into it."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words, opened = (process / "cmdline").read_text(), opened_by(process.name)
        except OSError:
            continue  # it has ended meanwhile
        if str(folder) in words or any(path.is_relative_to(folder) for path in opened):
            yield process.name


def servers_of(owner: int) -> str:
    return subprocess.run(["pgrep", "-f", f"fork_server.*{owner}$"], capture_output=True, text=True).stdout


@pytest.mark.parametrize(
    ("verb", "number"),
    [
        pytest.param("tune", signal.SIGTERM, marks=pytest.mark.slow),
        ("memory", signal.SIGHUP),
        pytest.param("run", signal.SIGTERM, marks=pytest.mark.slow),
        ("run --check-deterministic", signal.SIGINT),
    ],
)
def test_a_signal_ends_all_and_leaves_nothing(tmp_path: Path, verb: str, number: int) -> None:
    code, work, errors, owner = ended(tmp_path, verb, number)
    assert code == 128 + number
    assert "Traceback" not in errors
    assert not work.exists()
    assert list(users_of(work)) == []
    assert servers_of(owner) == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["flatout.toml", "train.py"]


@pytest.mark.slow
def test_what_a_killed_tune_leaves_is_swept(tmp_path: Path) -> None:
    code, work, _, owner = ended(tmp_path, "tune", signal.SIGKILL)
    assert code == -signal.SIGKILL
    end = time.monotonic() + PATIENCE_SECONDS
    while (servers_of(owner) or list(users_of(work))) and time.monotonic() < end:
        time.sleep(0.02)
    assert servers_of(owner) == ""
    assert list(users_of(work)) == []
    work_folder.sweep(PARENT)  # as the next tune does; one that runs beside this test may have been first
    assert not work.exists()


def test_ignored_signals_stay_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup
    try:
        with signals_as_exits():
            signal.raise_signal(signal.SIGHUP)
        with pytest.raises(SystemExit) as left, signals_as_exits():
            signal.raise_signal(signal.SIGTERM)
        assert left.value.code == 128 + signal.SIGTERM
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_handler_that_was_not_pythons_ends_as_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    installed: list[object] = []
    monkeypatch.setattr(signal, "signal", lambda number, handler: installed.append(handler))
    with signals_as_exits():
        installed.clear()
    assert set(installed) == {signal.SIG_DFL}
