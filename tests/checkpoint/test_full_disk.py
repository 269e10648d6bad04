"""A disk that is full loses nothing, at whichever call it is found to be full."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flatout.checkpoint.folder import Checkpoints
from flatout.errors import MachineError

CALLS = ("open", "write", "fsync", "rename", "mkdir")


class FullAt:
    """Counts calls into the system and fails the k-th."""

    def __init__(self, k: int, error: int) -> None:
        self.k, self.error, self.calls = k, error, 0

    def wrap(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls == self.k:
                raise OSError(self.error, os.strerror(self.error))
            return real(*args, **kwargs)

        return call


def state(step: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((50,), step)}, "optimizer": {0: torch.ones(2)}, "extra": step}


def save_failing_with(full: FullAt, folder: Path, asynchronous: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, full.wrap(getattr(os, name)))
        checkpoints = Checkpoints(folder, keep_last=1, asynchronous=asynchronous)
        checkpoints.save(state(2), step=2)
        checkpoints.close()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
@pytest.mark.filterwarnings("ignore:.*cannot be deleted")
def test_a_failure_at_any_call_loses_nothing(tmp_path: Path, error: int, asynchronous: bool) -> None:
    told = "no space for the checkpoint of step 2" if error == errno.ENOSPC else "Input/output error"
    failed = 0
    for k in itertools.count(1):
        folder = tmp_path / str(k)
        Checkpoints(folder).save(state(1), step=1)
        caught: MachineError | None = None
        full = FullAt(k, error)
        try:
            save_failing_with(full, folder, asynchronous)
        except MachineError as raised:
            caught = raised
        expected = 1 if caught else 2  # a call that may fail, such as a deletion: the save stands
        loaded = Checkpoints(folder).load()
        assert loaded is not None
        assert (loaded.step, loaded.notes, loaded.state["extra"]) == (expected, (), expected)
        if caught:
            failed += 1
            assert told in str(caught)
            assert "the checkpoints before it are untouched" in str(caught)
            assert isinstance(caught.__cause__, OSError)
            assert [path.name for path in folder.iterdir()] == ["000001-step-1"], k
        if full.calls < k:
            break
    assert failed >= 19


def test_space_is_checked_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=3 * 1024**2))
    with pytest.raises(MachineError) as caught:
        Checkpoints(tmp_path / "new").save({"extra": torch.zeros(1024**2)}, step=5)
    text = str(caught.value)
    assert text.startswith("no space for the checkpoint of step 5: it needs 4.06 MiB in ")
    assert "3 MiB is free" in text
    assert "keep_last=" in text
    assert not (tmp_path / "new").exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)]
    try:
        mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except OSError:
        mounted = False
    if not mounted:
        pytest.skip("mounting is not permitted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill_up(checkpoints: Checkpoints) -> int:
    """The first step for which there was no space."""
    for step in range(9):
        try:
            checkpoints.save({"extra": torch.full((75_000,), step, dtype=torch.float32)}, step=step)
        except MachineError as error:
            assert f"no space for the checkpoint of step {step}: it needs " in str(error)  # noqa: PT017
            return step
    raise AssertionError("the disk never was full")


@pytest.mark.parametrize("foreseen", [True, False])
def test_a_disk_that_is_really_full(small_disk: Path, monkeypatch: pytest.MonkeyPatch, foreseen: bool) -> None:
    if not foreseen:
        monkeypatch.setattr("flatout.checkpoint.folder.check_space", lambda *_: None)
    checkpoints = Checkpoints(small_disk, keep_last=5)
    saved = fill_up(checkpoints)
    assert saved in (2, 3)
    loaded = checkpoints.load()
    assert loaded is not None
    assert (loaded.step, loaded.notes) == (saved - 1, ())
    shutil.rmtree(small_disk / "000001-step-0")
    checkpoints.save({"extra": torch.zeros(75_000)}, step=9)
    latest = checkpoints.latest()
    assert latest is not None
    assert latest.step == 9
