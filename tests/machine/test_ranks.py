"""How a process finds its ranks, and leaves them."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from torch import distributed

import flatout
from flatout import environment
from flatout.errors import UsageError
from flatout.machine import ranks
from flatout.torch_private.ranks import gloo_works
from tests.processes import Python

ALONE = """
import os, sys
os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
from pathlib import Path
import torch, flatout
from torch import distributed
from flatout.machine.ranks import end_ranks

def threads():
    return [one.read_text().strip() for one in Path("/proc/self/task").glob("*/comm")].count("pt_gloo_runloop")

flatout.ranks()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
model.itself = [model]  # a cycle, as in a step that holds its model
model(torch.randn(2, 3)).sum().backward()
assert threads() or sys.platform != "linux"
if "gone" in sys.argv:
    del model
is_initialized = distributed.is_initialized
if "denied" in sys.argv:  # as in a script that `flatout run --devices` shares among ranks
    distributed.is_initialized = lambda: False
end_ranks()
print(is_initialized(), threads() if sys.platform == "linux" else 0)
"""


@pytest.mark.parametrize("words", [["gone"], ["kept"], ["gone", "denied"]], ids=" ".join)
@pytest.mark.slow
def test_the_threads_of_ranks_end_before_the_interpreter(python: Python, tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "alone.py").write_text(ALONE)
    found = python("alone.py", *words, cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    begun, threads = found.stdout.split()
    assert begun == "False"
    assert (int(threads) == 0) == ("gone" in words)


def test_a_thread_that_works_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([True, False, True, True, False, False, False])
    monkeypatch.setattr(distributed.distributed_c10d, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "destroy_process_group", lambda: None)
    monkeypatch.setattr("flatout.torch_private.ranks.gloo_works", lambda: next(looks))
    ranks.end_ranks()
    assert not list(looks)


def test_a_thread_that_never_ends_its_work_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "THREADS_SECONDS", 0.05)
    monkeypatch.setattr(distributed.distributed_c10d, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "destroy_process_group", lambda: None)
    monkeypatch.setattr("flatout.torch_private.ranks.gloo_works", lambda: True)
    ranks.end_ranks()


def test_no_thread_of_gloo_works_here() -> None:
    assert not gloo_works()


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A process without the variables of launchers; what warns once has not done so."""
    monkeypatch.setattr(ranks, "_warned", [])
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_one_of_several_needs_its_number(no_launcher: pytest.MonkeyPatch) -> None:
    no_launcher.setenv("WORLD_SIZE", "1")
    assert environment.launched() is None
    no_launcher.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="WORLD_SIZE set, but not RANK and MASTER_ADDR and MASTER_PORT; a launcher"):
        flatout.ranks()


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"])
def test_tasks_that_do_not_know_of_one_another_are_warned_once(no_launcher: pytest.MonkeyPatch, name: str) -> None:
    no_launcher.setenv(name, "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flatout.ranks()
        no_launcher.setenv("SLURM_NTASKS", "4")  # of a batch script, which runs once
        flatout.ranks()
    no_launcher.setenv(name, "4")
    with pytest.warns(UserWarning, match=f"{name} is 4, and RANK is not set: each of these processes is alone"):
        assert flatout.ranks().count == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flatout.ranks()
