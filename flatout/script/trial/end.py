"""End the process of a trial, with everything that it started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from typing import Protocol

PATIENCE_SECONDS = 10.0
"""With the trial's own end: the kernel has to take down every process in it."""


class Process(Protocol):
    """As much of `subprocess.Popen` as the parent of a trial uses."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, number: int, /) -> None: ...


def end_trial(process: Process) -> None:
    """Returns when it has ended. It was started in a session of its own, and has split itself (isolation.processes):
    what the parent sees is the process that waits outside. Told to end, it first ends all the others."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE_SECONDS)
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)  # what a process had started that never got as far as splitting
    process.wait()
