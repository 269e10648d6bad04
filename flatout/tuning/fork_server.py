"""Trials that need not load torch, because they are forked from a process that has (`flatout.script.fork_server`).

    with ForkServer() as server:                            # it loads torch meanwhile
        setup = TrialSetup(..., fork_server=server)

Loading torch takes seconds, and a tune starts its script a dozen times. Where a fork is not possible, or the script
needs a process of its own, `is_ready` says no, and trials start as new processes.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from flatout.environment import trial_environment
from flatout.script.child_command import child_command
from flatout.script.fork_server import MESSAGE_BYTES

POLL_SECONDS = 0.002
KILLED = -signal.SIGKILL


class Forked:
    """A trial that the server has started."""

    def __init__(self, pid: int, exit_code: Callable[[int], int | None]) -> None:
        self.pid, self._exit_code = pid, exit_code
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._exit_code(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(POLL_SECONDS)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """One server for all trials of a tune. Every trial must have ended before it is closed."""

    def __init__(self) -> None:
        self.load_seconds = 0.0
        """From its start until it could be forked."""
        self.obstacle: str | None = None
        """Why it is not to be forked; '' if it is, None: it has not said yet."""
        self._asked = 0
        self._began = time.perf_counter()
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                child_command("flatout.script.fork_server", str(theirs.fileno()), str(os.getpid())),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=trial_environment({}),
                start_new_session=True,
            )

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The parent of all that it starts."""
        return self._process.pid

    def is_ready(self) -> bool:
        """Can it be forked? Waits until that is known."""
        if self.obstacle is None:
            told = self._received() or {"obstacle": "it ended", "time": self._began}
            self.obstacle = told["obstacle"]
            self.load_seconds = told["time"] - self._began
        return not self.obstacle

    def start(self, config: Path, streams: Sequence[IO[Any]], pipes: Sequence[int]) -> Forked | None:
        """A trial by this file of settings; None if the server is gone. streams: its stdin, stdout and stderr; pipes:
        those for commands and answers."""
        given = [*(stream.fileno() for stream in streams), *pipes]
        pid = self._answer({"config": str(config), "folder": os.getcwd()}, given)
        if pid is None:
            self.obstacle = "it ended"
            return None
        return Forked(pid, self.exit_code)

    def exit_code(self, pid: int) -> int | None:
        """Of one that it started; None while that runs."""
        return self._answer({"poll": pid}, otherwise=KILLED)  # the kernel ends with the server all that it has started

    def close(self) -> None:
        """End it. What it started must have ended."""
        self.obstacle = self.obstacle or "it was closed"
        self._connection.close()
        self._process.kill()
        self._process.wait()

    def _answer(self, request: dict[str, Any], given: Sequence[int] = (), otherwise: int | None = None) -> int | None:
        self._asked += 1
        try:
            socket.send_fds(self._connection, [json.dumps({**request, "number": self._asked}).encode()], given)
            while (told := self._received()) is not None:
                if told["number"] == self._asked:  # Ctrl-C may have left an earlier one unread
                    answer: int | None = told["answer"]
                    return answer
        except OSError:
            pass
        return otherwise

    def _received(self) -> dict[str, Any] | None:
        message = self._connection.recv(MESSAGE_BYTES)
        return json.loads(message) if message else None
