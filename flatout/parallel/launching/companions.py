"""Two processes beside the ranks: a guard, which ends them if the launcher is killed, and the store they meet at."""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from flatout.errors import MachineError
from flatout.parallel.launching import guard as guard_module
from flatout.parallel.launching import store_process

_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
_STORE_ENDS_SECONDS = 5.0


class Guard:
    """Knows the process groups that would have to be killed, and a folder that would have to be removed."""

    def __init__(self) -> None:
        try:
            self.folder = Path(tempfile.mkdtemp(prefix="flatout-launch-"))
        except OSError as error:
            raise MachineError(
                f"no folder for temporary files can be made: {error.strerror}",
                limit="ranks say in small files there how far they are",
                remedy="free some space, or set TMPDIR to a folder that you may write",
            ) from error
        """Small files of the launcher and its ranks, while they run."""
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", guard_module.__file__, str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in the terminal is not for it
        )

    def watch(self, group: int) -> None:
        self._say(group)

    def forget(self, group: int) -> None:
        self._say(-group)

    def _say(self, number: int) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # somebody has killed it
            self._process.stdin.write(b"%d\n" % number)
            self._process.stdin.flush()

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


class Store:
    """Where the ranks of one attempt meet; a new one for each, so that nothing of the last one is left in it."""

    def __init__(self, listener: socket.socket, *, at_once: bool, log: Path) -> None:
        self._log = log
        with listener, open(log, "wb") as errors:
            listener.set_inheritable(True)
            self._process = subprocess.Popen(
                [sys.executable, "-P", store_process.__file__, str(listener.fileno()), "now" if at_once else "later"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=[listener.fileno()],
                start_new_session=True,
            )

    def check(self) -> None:
        """Raises MachineError if it has ended by itself."""
        if self._process.poll() is not None:
            lines = self._log.read_text(errors="replace").split("\n") if self._log.exists() else []
            said = next((line for line in reversed(lines) if line.strip()), "no reason given")
            raise MachineError(
                f"the store where ranks meet has ended: {said}",
                limit="it needs torch with torch.distributed",
                remedy="see: flatout check",
            )

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_STORE_ENDS_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def orphans_adopted() -> Iterator[None]:
    """Within, processes whose parent ends become this process's children, rather than the system's, so that none is
    lost sight of; on Linux."""
    if sys.platform != "linux":
        yield
        return
    system, before = ctypes.CDLL(None), ctypes.c_int(0)
    system.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    system.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        system.prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)
