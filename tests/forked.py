"""Trials forked from the test's own process, which has loaded torch already: an empty trial takes 0.2 s and not 3 s.

A test asks for it with `pytestmark = pytest.mark.usefixtures("forked_trials")`. Everything else about a trial is as
always: its pipes, its isolation, its end. Not for tests of what happens before torch is loaded (what is set in the
environment for it, a script that never loads it), nor for times.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import pytest

from flatout.script import memory_trial
from flatout.tune import trial_process


class ForkedProcess:
    """As much of `subprocess.Popen` as the parents of trials use, for `python -m MODULE ...`."""

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
        assert command[:2] == [sys.executable, "-m"], command
        assert start_new_session
        self.returncode: int | None = None
        out = stdout.fileno()
        error = out if stderr == subprocess.STDOUT else stderr.fileno()
        path = _python_path()
        self.pid = os.fork()
        if self.pid == 0:
            _become(command[2], command[3:], (stdin.fileno(), out, error), pass_fds, env, path)

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


@functools.cache
def _python_path() -> list[str]:
    """What `sys.path` is after a start without pytest; its first entry is for the place of the program."""
    words = [sys.executable, "-c", "import sys; print('\\n'.join(sys.path))"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.rstrip("\n").split("\n")


def _become(
    module: str,
    arguments: Sequence[str],
    streams: Sequence[int],
    pass_fds: Sequence[int],
    environment: Mapping[str, str],
    path: Sequence[str],
) -> NoReturn:
    """Turn this copy of the test's process into one that Python has just started, and run `module` in it."""
    status = 1
    try:
        _forget_the_test()
        os.setsid()
        _take_streams(streams, pass_fds)
        os.environ.clear()
        os.environ.update(environment)
        sys.path[:] = [os.getcwd(), *path[1:]]
        sys.argv[:] = [module, *arguments]
        sys.modules.pop(module, None)  # or runpy warns of it
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)


def _forget_the_test() -> None:
    """What the test's process set up for itself, and a new process has not."""
    atexit._clear()
    for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    importlib.reload(warnings)  # pytest collects them
    sys.excepthook, sys.unraisablehook, threading.excepthook = (
        sys.__excepthook__,
        sys.__unraisablehook__,
        threading.__excepthook__,
    )
    gc.freeze()  # no collection walks through the test's objects, nobody finds them among what the script holds


def _take_streams(streams: Sequence[int], pass_fds: Sequence[int]) -> None:
    for number, descriptor in enumerate([os.dup(one) for one in streams]):
        os.dup2(descriptor, number)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in pass_fds:
            try:
                os.close(int(name))
            except OSError:
                pass  # the one that listed them
    for descriptor in pass_fds:
        os.set_inheritable(descriptor, True)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = open(  # type: ignore[misc]
        2, "w", buffering=1, errors="backslashreplace", closefd=False
    )


class _Subprocess:
    """The module `subprocess`, where a start is a fork."""

    Popen = ForkedProcess

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)


@pytest.fixture
def forked_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._dynamo

    torch.optim.SGD([torch.zeros(1)], 0.1)  # what torch loads with the first optimizer is loaded before the forks
    for module in (trial_process, memory_trial):
        monkeypatch.setattr(module, "subprocess", _Subprocess())
