"""A test that hangs must say so, not stop everything: each has an alarm. Tests compute in one thread."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.busy_ceilings import keep_busy_ceilings

pytest_plugins = ["tests.processes"]

TEST_SECONDS = 600
"""Many times what the slowest takes, for a machine that others keep busy."""

# Threads that wait for each other on a busy machine take many times as long, and workers run side by side. torch is not
# imported yet: this holds for it and for processes of tests.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Where the environment forbids it too: each worker would compile all tests, and each process of a test the package.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# What tests measure and build is kept for the next run of tests, and never for the user's own runs.
os.environ["FLATOUT_CACHE_DIR"] = str(Path(__file__).parents[1] / ".pytest_cache" / "flatout")
os.environ["FLATOUT_RUNS_DIR"] = str(Path(__file__).parents[1] / ".pytest_cache" / "flatout-runs")
os.environ["FLATOUT_NO_HISTORY"] = "1"  # a tune of one test would change the order of trials in another
# A shell lets what it starts in the background ignore Ctrl-C, and its children too: tests that press it would wait.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup, whose wish a tune respects
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="module", autouse=True)
def _what_is_loaded_is_not_walked() -> None:
    """torch, its compiler and all files of tests are a million objects, and a full collection takes a second: many
    tests and the code under test ask for one. What a file of tests leaves behind is collected before it is frozen."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before the cases are selected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The cases of a test marked `first_case` are slow, but for the first that is not."""
    quick = set()
    for item in items:
        if item.get_closest_marker("first_case") is None or item.get_closest_marker("slow") is not None:
            continue
        test = item.nodeid.partition("[")[0]
        if test in quick:
            item.add_marker(pytest.mark.slow)
        quick.add(test)


def pytest_sessionfinish() -> None:
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _alarm() -> Iterator[None]:
    def fail(*_: object) -> None:
        raise TimeoutError(f"the test took more than {TEST_SECONDS} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(TEST_SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(autouse=True)
def busy_ceilings_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests side by side make every minute a busy one, and each tune would measure the machine for seconds."""
    keep_busy_ceilings(monkeypatch.setattr)


@pytest.fixture
def in_removed_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current folder is one that is no longer there."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """The tensors are small, and threads that wait for one another on a busy machine are slow."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def uncompiled_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao compiles its step anew for each shape and set of hyperparameters; uncompiled it computes the same."""
    import torchao.optim.adam

    monkeypatch.setattr(torchao.optim.adam, "torch", _Uncompiled())


class _Uncompiled:
    """The module `torch`, in which to compile changes nothing."""

    def __getattr__(self, name: str) -> Any:
        import torch

        return getattr(torch, name)

    def compile(self, function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        return function
