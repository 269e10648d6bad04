"""Only one of a search's trials runs steps at a time; others load, or wait.

Two trials that start at once reach their first steps at once. With as many threads each as there are cores, threads
that wait for the other half of a parallel loop keep a core that this half needs: on 2 cores, steps of 28 ms took
seconds.

    turn = Turn(folder)
    turn.take()          # waits until no other trial has it
    turn.leave()

The kernel takes it from a process that ends.
"""

from __future__ import annotations

from pathlib import Path
from typing import IO

NAME = "turn"


class Turn:
    """One process's side. folder: shared by the trials."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._file: IO[bytes] | None = None
        """Open while it has the turn."""

    def take(self) -> None:
        """Nothing changes where it has the turn already."""
        import fcntl  # Windows lacks it, and must be able to import this file

        if self._file is None:
            self._file = open(self._path, "ab")  # noqa: SIM115 - closed by `leave`
            fcntl.flock(self._file, fcntl.LOCK_EX)

    def leave(self) -> None:
        import fcntl

        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_UN)  # a loader's workers may have it open too
            self._file.close()
            self._file = None
