"""Processes that another one has forked for this one: polled and ended through it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from flatout.errors import TrialError

if TYPE_CHECKING:
    from flatout.script.trial.process import TrialProcess

POLL_SECONDS = 0.002
STREAMS = 3
"""stdin, stdout and stderr."""
KILLED = -9
"""SIGKILL, which the signal module lacks on Windows."""


def take_streams(given: Sequence[int]) -> Sequence[int]:
    """In a process that was forked: its streams from here on are the first of these descriptors; returns the others."""
    for number, stream in enumerate(given[:STREAMS]):
        os.dup2(stream, number)
        os.close(stream)
    return given[STREAMS:]


def count_threads() -> int:
    return len(os.listdir("/proc/self/task"))


class Polled:
    """exit_code: of the process; None while it runs."""

    def __init__(self, exit_code: Callable[[], int | None]) -> None:
        self._exit_code = exit_code
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._exit_code()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
            time.sleep(POLL_SECONDS)
        return code


class Forked(Polled):
    """A trial that the fork server has started."""

    def __init__(self, pid: int, exit_code: Callable[[int], int | None]) -> None:
        super().__init__(lambda: exit_code(pid))
        self.pid = pid

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkOfTrial(Polled):
    """A trial that was forked from another one's process. number: its id there, which may be in a namespace."""

    def __init__(self, parent: TrialProcess, number: int) -> None:
        super().__init__(self._asked)
        self._parent, self._number = parent, number

    def _asked(self) -> int | None:
        try:
            code: int | None = self._parent.ask_of_fork("poll", self._number)["code"]
        except TrialError:  # it has ended, and what was forked from it with it
            return KILLED
        return code

    def end(self) -> None:
        """Returns when it has ended."""
        if self.poll() is None:
            with contextlib.suppress(TrialError):
                self._parent.ask_of_fork("kill", self._number)
        self.wait()
