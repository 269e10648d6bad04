"""Python processes that begin with torch and Flatout already imported: a server imports them once, and forks.

For tests of what a process does, not of how Python starts: importing takes seconds, a fork some milliseconds. Each
process has a `__main__`, arguments, output and an exit status of its own, can be killed, and ends as Python ends.
Unlike those of tests/forked.py, several run at once, and what trains with the library finds it loaded.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from tests.prepared_server import MESSAGE_BYTES

SECONDS = 120
"""Of one exchange with the server: a process that takes longer is killed, and the test fails."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What `python -W ACTION ... PATH ARGUMENTS` (or `-c CODE`) would run in `folder`; '' is this process's own."""

    code: str = ""
    path: str = ""
    arguments: tuple[str, ...] = ()
    folder: str = ""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Ended:
    """returncode: negative for the signal that killed it."""

    returncode: int
    stdout: str
    stderr: str


class PreparedPython:
    """Starts its server with the first job; `close` ends it."""

    def __init__(self) -> None:
        self._connection: socket.socket | None = None
        self._server: subprocess.Popen[bytes] | None = None

    def start(self, job: Job, stdout: IO[bytes], stderr: IO[bytes]) -> int:
        """The process's id, known to the server; `wait` must follow."""
        message = json.dumps({"job": asdict(job)}).encode()
        assert len(message) < MESSAGE_BYTES
        connection = self._connected()
        socket.send_fds(connection, [message], [stdout.fileno(), stderr.fileno()])
        answer = connection.recv(MESSAGE_BYTES)
        assert answer, "the server ended: see its error above"
        return int(answer)

    def wait(self, pid: int) -> int:
        """Its exit status, negative for a signal."""
        connection = self._connected()
        connection.send(json.dumps({"wait": pid}).encode())
        try:
            return int(connection.recv(MESSAGE_BYTES))
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)
            connection.recv(MESSAGE_BYTES)
            raise

    def run(self, *jobs: Job) -> list[Ended]:
        """All at once, until the last has ended."""
        with ExitStack() as stack:
            files = [[stack.enter_context(tempfile.TemporaryFile()) for _ in range(2)] for _ in jobs]
            codes = self._codes([self.start(job, *pair) for job, pair in zip(jobs, files, strict=True)])
            return [
                Ended(returncode=code, stdout=_text(out), stderr=_text(err))
                for code, (out, err) in zip(codes, files, strict=True)
            ]

    def _codes(self, pids: Sequence[int]) -> list[int]:
        waiting = list(pids)
        codes = []
        try:
            while waiting:
                codes.append(self.wait(waiting.pop(0)))
        finally:
            for pid in waiting:  # not reaped yet, so the number is still theirs
                os.kill(pid, signal.SIGKILL)
                self.wait(pid)
        return codes

    def _connected(self) -> socket.socket:
        if self._connection is None:
            self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._connection.settimeout(SECONDS)
            with theirs:
                command = [sys.executable, "-m", "tests.prepared_server", str(theirs.fileno())]
                self._server = subprocess.Popen(
                    command, cwd=Path(__file__).parents[1], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
                )
        return self._connection

    def close(self) -> None:
        """End the server; what it started must have been waited for."""
        if self._connection is not None and self._server is not None:
            self._connection.close()
            self._server.wait(SECONDS)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()
