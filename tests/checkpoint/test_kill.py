"""A process that is killed while it saves leaves a checkpoint that is whole."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
import torch

from flatout.checkpoint.capturing import capture
from flatout.checkpoint.disk import abandoned_folders
from flatout.checkpoint.folder import Checkpoints
from tests.checkpoint import saving_child

ROOT = Path(__file__).parents[2]
KILLS = 8  # in each of two ways of saving


@pytest.mark.parametrize("mode", [pytest.param("synchronous", marks=pytest.mark.slow), "asynchronous"])
def test_a_killed_process_leaves_a_whole_checkpoint(tmp_path: Path, mode: str) -> None:
    chance = random.Random(mode)
    command = [sys.executable, "-W", "ignore", "-m", "tests.checkpoint.saving_child", str(tmp_path), mode, str(KILLS)]
    last = 0
    with forking(command) as lines:
        for number in range(KILLS):
            child, began = map(int, lines.readline().split())
            assert began == last  # it goes on from where the one before it was killed
            while number % 2 and newest(tmp_path) <= began:  # however busy the machine is, some get on
                time.sleep(0.002)
            time.sleep(0.05 + 0.1 * chance.random())
            os.kill(child, signal.SIGKILL)
            assert lines.readline() == "dead\n"
            last = whole_step(tmp_path)
            assert last >= began
    assert last > 0
    Checkpoints(tmp_path).save({"extra": 1}, step=last + 1)
    assert abandoned_folders(tmp_path) == []


@contextlib.contextmanager
def forking(command: list[str]) -> Iterator[IO[str]]:
    """What the forker and its children write; none of them outlives the block."""
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True) as forker:
        assert forker.stdout is not None
        try:
            yield forker.stdout
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(forker.pid, signal.SIGKILL)


def newest(folder: Path) -> int:
    """The step of the last save that was finished; 0: none was."""
    return max((int(one.name.rpartition("-")[2]) for one in folder.glob("[0-9]*-step-*")), default=0)


def whole_step(folder: Path) -> int:
    """The step that is loaded; only an interrupted save may be skipped, never a finished one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = Checkpoints(folder).load()
    if loaded is None:  # killed before its first save was whole
        return 0
    assert all("interrupted" in note for note in loaded.notes)
    assert torch.equal(loaded.state["model"]["weight"].flatten(), saving_child.content(loaded.step))
    assert loaded.state["extra"] == {"step": loaded.step}
    return loaded.step


def test_dying_at_every_single_call(tmp_path: Path) -> None:
    """As SIGKILL between any two calls into the system: in a forked child that ends there and then."""
    k, survived = 0, False
    while not survived:
        k += 1
        folder = tmp_path / str(k)
        checkpoints = Checkpoints(folder, keep_last=1)
        checkpoints.save(capture(extra=1), step=1)
        survived = _child_dies_at(k, folder)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = Checkpoints(folder).load()
        assert loaded is not None
        assert loaded.state["extra"] == loaded.step, k
        Checkpoints(folder, keep_last=1).save(capture(extra=3), step=3)
        assert os.listdir(folder) in (["000003-step-3"], ["000002-step-3"]), k
    assert k > 20


def _child_dies_at(k: int, folder: Path) -> bool:
    """Save step 2 in a fork that ends at its k-th call; True if it got to the end."""
    child = os.fork()
    if child == 0:
        count = 0

        def counted(name: str):  # type: ignore[no-untyped-def]
            real = getattr(os, name)

            def call(*args, **kwargs):  # type: ignore[no-untyped-def]
                nonlocal count
                count += 1
                if count == k:
                    os._exit(9)
                return real(*args, **kwargs)

            return call

        for name in ("open", "write", "fsync", "rename", "mkdir", "unlink", "rmdir"):
            setattr(os, name, counted(name))
        Checkpoints(folder, keep_last=1).save(capture(extra=2), step=2)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
