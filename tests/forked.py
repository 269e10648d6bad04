"""Processes that need not load torch, because they are forked from one that has: 0.2 s each and not 3 s.

    @pytest.mark.usefixtures("forked_trials")          # trials are forked from the test's own process
    def test_...(python):                              # python("train.py", cwd=folder), python("-m", "flatout", ...)

Everything else about a trial is as always: its pipes, its isolation, its end. `python` forks from a process that has
loaded torch and has done nothing else. Not for tests of what happens before torch is loaded (what is set in the
environment for it, a script that never loads it), of a script's own traceback, nor of times.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from flatout.script import memory_trial
from flatout.script.child_command import child_command
from flatout.tune import trial_process
from tests.new_process import become, python_path


class ForkedProcess:
    """As much of `subprocess.Popen` as the parents of trials use, for the `child_command` of a module."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdin: Any,
        stdout: Any,
        stderr: Any,
        env: Mapping[str, str],
        pass_fds: Sequence[int] = (),
        start_new_session: bool,
    ) -> None:
        assert command[:3] == child_command("")[:3], command
        assert start_new_session
        self.returncode: int | None = None
        out = stdout.fileno()
        error = out if stderr == subprocess.STDOUT else stderr.fileno()
        path = python_path()
        self.pid = os.fork()
        if self.pid == 0:
            become(["-m", *command[3:]], (stdin.fileno(), out, error), pass_fds, env, path)

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        """However long it takes: a trial that does not end is for the test's alarm."""
        code = self._wait(0)
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


class _Subprocess:
    """The module `subprocess`, where a start is a fork."""

    Popen = ForkedProcess

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)


def fork_trials(replace: Callable[[Any, str, Any], None]) -> None:
    """replace: `setattr`, or a test's own, which is taken back."""
    import torch._dynamo

    torch.optim.SGD([torch.zeros(1)], 0.1)  # what torch loads with the first optimizer is loaded before the forks
    for module in (trial_process, memory_trial):
        replace(module, "subprocess", _Subprocess())


@pytest.fixture
def forked_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_trials(monkeypatch.setattr)


Python = Callable[..., subprocess.CompletedProcess[str]]

FORKER = """
import json, os, sys, numpy, torch, torch._dynamo
torch.optim.SGD([torch.zeros(1)], 0.1)
sys.path.insert(0, sys.argv[1])
from tests.new_process import become
path = json.loads(sys.argv[2])
for line in sys.stdin:
    asked = json.loads(line)
    pid = os.fork()
    if pid == 0:
        os.chdir(asked["cwd"])
        nothing = os.open(os.devnull, os.O_RDONLY)
        streams = (nothing, *(os.open(name, os.O_WRONLY) for name in asked["files"]))
        become(asked["words"], streams, (), asked["environment"], path)
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Python]:
    """`python(*words, cwd=folder, env=None)`: what `python WORDS` gives, without a start."""
    root, folder = Path(__file__).parents[1], tmp_path_factory.mktemp("forker")
    files = [folder / "stdout", folder / "stderr"]
    command = [sys.executable, "-c", FORKER, str(root), json.dumps(python_path())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as forker:
        asks, answers = forker.stdin, forker.stdout
        assert asks is not None
        assert answers is not None

        def run(*words: str, cwd: Path, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
            for file in files:
                file.write_text("")
            asked = {"words": words, "cwd": str(cwd), "environment": dict(os.environ if env is None else env)}
            asks.write(json.dumps({**asked, "files": [str(file) for file in files]}) + "\n")
            asks.flush()
            pid = int(answers.readline())
            try:
                code = int(answers.readline())
            except TimeoutError:  # the alarm of every test
                os.kill(pid, signal.SIGKILL)
                answers.readline()
                raise
            return subprocess.CompletedProcess(words, code, *(file.read_text() for file in files))

        yield run
        asks.close()
