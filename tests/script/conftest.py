"""Run a script twice: by Python alone, and by `flatout run`."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from flatout.script.runner import Runner


@dataclass(frozen=True)
class Pair:
    """The same command by Python alone and by `flatout run`."""

    plain: subprocess.CompletedProcess[str]
    watched: subprocess.CompletedProcess[str]

    def assert_equal(self) -> None:
        assert self.watched.stdout == self.plain.stdout
        assert self.watched.stderr == self.plain.stderr
        assert self.watched.returncode == self.plain.returncode


@pytest.fixture
def runner() -> Iterator[Runner]:
    """Watches this process's torch, until the test ends."""
    import torch

    runner = Runner()
    runner._torch_imported(torch)
    yield runner
    assert runner.fault is None
    runner.watch.uninstall()


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], Path]:
    """Write a script, and the folders that lead to it."""

    def write(name: str, source: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
        return path

    return write


@pytest.fixture
def run_both(tmp_path: Path) -> Callable[..., Pair]:
    """`run_both(['train.py', 'a b'])`: in the folder of the scripts, without a terminal."""

    def run(command: list[str], *, stdin: str = "", options: tuple[str, ...] = ()) -> Pair:
        environment = {**os.environ, "FLATOUT_CACHE_DIR": str(tmp_path / ".cache"), "PYTHONDONTWRITEBYTECODE": "1"}

        def one(prefix: list[str]) -> subprocess.CompletedProcess[str]:
            words = [sys.executable, *prefix, *command]
            return subprocess.run(
                words, cwd=tmp_path, env=environment, input=stdin, capture_output=True, text=True, timeout=120
            )

        return Pair(one([]), one(["-m", "flatout", "run", *options]))

    return run
