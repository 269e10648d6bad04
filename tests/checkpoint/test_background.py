"""Saving in the background: the same files, of the moment of the call, one in flight, failures told."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flatout.checkpoint import folder as folder_module
from flatout.checkpoint.background import BackgroundWork, HostCopies
from flatout.checkpoint.capturing import capture
from flatout.checkpoint.folder import Checkpoints
from flatout.errors import MachineError, UsageError
from tests.odd_defaults import odd_defaults

ROOT = Path(__file__).parents[2]


def a_state() -> dict[str, Any]:
    weight = torch.randn(50, 20)
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    optimizer = {"state": {0: {"step": torch.tensor(1.0), "exp_avg": image}}}
    return {"model": {"w": weight, "tied": weight, "t": weight.t()}, "optimizer": optimizer, "extra": torch.empty(0)}


class Gate:
    """Lets a background write begin only when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, real = threading.Event(), folder_module.fill

        def fill(*args: Any, **kwargs: Any) -> None:
            assert self.open.wait(20)
            real(*args, **kwargs)

        monkeypatch.setattr(folder_module, "fill", fill)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


def test_the_files_are_those_of_a_synchronous_save(tmp_path: Path) -> None:
    state = a_state()
    Checkpoints(tmp_path / "a").save(state, step=1, metric=2.0)
    with Checkpoints(tmp_path / "b", asynchronous=True) as checkpoints:
        checkpoints.save(state, step=1, metric=2.0)
    (a,), (b,) = (list((tmp_path / name).iterdir()) for name in "ab")
    assert {one.name: one.read_bytes() for one in a.iterdir()} == {one.name: one.read_bytes() for one in b.iterdir()}


def test_later_changes_do_not_reach_the_save(tmp_path: Path, gate: Gate) -> None:
    state = a_state()
    expected = state["model"]["w"].clone()
    with Checkpoints(tmp_path, asynchronous=True) as checkpoints:
        checkpoints.save(state, step=1)
        state["model"]["w"].zero_()
        state["optimizer"]["state"][0]["exp_avg"].fill_(7)
        state["optimizer"]["state"].clear()
        assert list(tmp_path.glob("0*-step-*")) == []
        gate.open.set()
        loaded = checkpoints.load()  # waits for what is in flight
        assert loaded is not None
        assert torch.equal(loaded.state["model"]["w"], expected)
        assert loaded.state["model"]["w"] is loaded.state["model"]["tied"]
        assert not (loaded.state["optimizer"]["state"][0]["exp_avg"] == 7).any()


def test_one_save_is_in_flight_and_the_next_waits(tmp_path: Path, gate: Gate) -> None:
    with Checkpoints(tmp_path, asynchronous=True) as checkpoints:
        checkpoints.save({"extra": torch.tensor(1)}, step=1)
        timer = threading.Timer(0.2, gate.open.set)
        timer.start()
        checkpoints.save({"extra": torch.tensor(2)}, step=2)  # its copies overwrite those of step 1
        assert gate.open.is_set()
        timer.join()
    assert [int(Checkpoints(tmp_path).at(step).load()["extra"]) for step in (1, 2)] == [1, 2]


def test_buffers_are_used_again_and_given_back() -> None:
    copies = HostCopies()
    tensors = {("a", "x"): torch.ones(3), ("a", "y"): torch.ones(4)}
    first = copies.take(tensors)
    second = copies.take({("a", "x"): torch.zeros(3), ("a", "y"): torch.ones(5)})
    assert second["a", "x"].data_ptr() == first["a", "x"].data_ptr()
    assert [one.tolist() for one in second.values()] == [[0.0] * 3, [1.0] * 5]
    copies.release()
    assert copies._buffers == {}


@pytest.mark.parametrize("ask", ["save", "wait", "close"])
def test_a_failure_is_raised_by_the_next_call_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask: str) -> None:
    checkpoints = Checkpoints(tmp_path, asynchronous=True)
    checkpoints.save({"extra": 1}, step=1)
    checkpoints.wait()
    with monkeypatch.context() as patch:

        def full(*_: object, **__: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(folder_module, "fill", full)
        checkpoints.save({"extra": 2}, step=2)
        latest = checkpoints.latest()  # asking tells nothing of it, and waits
    assert latest is not None
    assert latest.step == 1
    calls = {"save": lambda: checkpoints.save({}, step=3), "wait": checkpoints.wait, "close": checkpoints.close}
    with pytest.raises(MachineError, match="no space for the checkpoint of step 2") as caught:
        calls[ask]()
    assert isinstance(caught.value.__cause__, OSError)
    checkpoints.save({"extra": 4}, step=4)
    checkpoints.close()
    assert checkpoints.at(4).load() == {"extra": 4}


def test_what_cannot_be_stored_is_refused_at_once(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, asynchronous=True) as checkpoints, pytest.raises(UsageError, match="is of type object"):
        checkpoints.save({"extra": object()}, step=1)


def test_the_folder_is_freed_when_nobody_holds_it(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, asynchronous=True)
    checkpoints.save({"extra": torch.ones(3)}, step=1)
    del checkpoints
    gc.collect()
    assert Checkpoints(tmp_path).at(1).load()["extra"].tolist() == [1, 1, 1]


@pytest.mark.slow
def test_a_program_that_ends_finishes_its_save_and_tells_of_a_failure(tmp_path: Path) -> None:
    program = f"""
import sys, time, torch
from flatout.checkpoint import folder
real = folder.fill
def slow(*args, **kwargs):
    time.sleep(0.3)
    if len(sys.argv) > 1:
        raise OSError(28, "full")
    real(*args, **kwargs)
folder.fill = slow
checkpoints = folder.Checkpoints({str(tmp_path)!r}, asynchronous=True)
checkpoints.save({{"extra": torch.ones(2)}}, step=1)
"""
    children = [
        subprocess.Popen([sys.executable, "-c", program, *more], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        for more in ([], ["fail"])
    ]
    errors = [child.communicate(timeout=200)[1] for child in children]
    assert errors[0] == ""
    assert "MachineError: no space for the checkpoint of step 1" in errors[1]
    assert os.listdir(tmp_path) == ["000001-step-1"]


def test_a_thread_that_does_not_start_leaves_nothing_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    work = BackgroundWork()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fails)
        with pytest.raises(RuntimeError, match="can't start"):
            work.start(lambda: None)
    work.wait()
    done: list[int] = []
    work.start(lambda: done.append(1))
    work.wait()
    assert done == [1]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_threads_that_save_at_once_take_turns(tmp_path: Path, asynchronous: bool) -> None:
    errors: list[BaseException] = []
    with Checkpoints(tmp_path, asynchronous=asynchronous, keep_last=100) as checkpoints:

        def save(first: int) -> None:
            try:
                for step in range(first, first + 5):
                    checkpoints.save({"model": {"a": torch.full((3000,), float(step))}}, step=step)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=save, args=(first,)) for first in (0, 100, 200)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []
    for first in (0, 100, 200):
        for step in range(first, first + 5):
            assert bool((checkpoints.at(step).load()["model"]["a"] == step).all())


@pytest.mark.parametrize("asynchronous", [False, True])
def test_tensors_stay_on_the_cpu_whatever_the_default_device_is(tmp_path: Path, asynchronous: bool) -> None:
    weight = torch.arange(12.0).view(3, 4)
    extra = {"transposed": weight.t(), "part": weight[1:], "row": weight[1], "none": np.zeros(0)}
    with odd_defaults():
        with contextlib.closing(Checkpoints(tmp_path / "run", asynchronous=asynchronous)) as checkpoints:
            checkpoints.save(capture(extra=extra), step=1)
        loaded = Checkpoints(tmp_path / "run").load()
    assert loaded is not None
    found: Any = loaded.state["extra"]
    assert all(torch.equal(found[name], value) for name, value in extra.items() if isinstance(value, torch.Tensor))
