"""Whatever a process has started."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from flatout.descendants import descendants
from flatout.timing import LoadWatch

BELOW = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])"


@pytest.fixture
def started() -> Iterator[int]:
    """A process that has started another one."""
    with subprocess.Popen([sys.executable, "-c", BELOW], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid


@pytest.fixture(params=["seen", "hidden"])
def others(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """hidden: as for an ordinary user where /proc is mounted with hidepid=1."""

    def refused(process: psutil.Process, recursive: bool = False) -> list[psutil.Process]:
        raise psutil.AccessDenied(1)

    def parent(process: psutil.Process, real: object = psutil.Process.ppid) -> int:
        if process.pid == 1:
            raise psutil.AccessDenied(1)
        return real(process)  # type: ignore[operator]

    if request.param == "hidden":
        monkeypatch.setattr(psutil.Process, "children", refused)
        monkeypatch.setattr(psutil.Process, "ppid", parent)


@pytest.mark.usefixtures("others")
def test_all_that_a_process_has_started_are_found(started: int) -> None:
    below = [one.pid for one in descendants(started)]
    assert len(below) == 1
    assert {started, *below} <= {one.pid for one in descendants()}
    assert os.getpid() not in below


@pytest.mark.usefixtures("others")
def test_the_load_is_watched_where_the_processes_of_others_are_hidden() -> None:
    LoadWatch()


def test_a_process_that_has_ended_has_none() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    with pytest.raises(psutil.NoSuchProcess):
        descendants(process.pid)
