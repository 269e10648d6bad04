"""A status line at the foot of a terminal, beneath a script that owns the rest of it.

The terminal is told to scroll all lines but the last (a DECSTBM region, as package managers do for their progress), so
whatever the script writes, progress bars with carriage returns too, stays its own. Nothing of the script's output is
read or redirected. Only for a terminal: the caller checks.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

REFRESH_SECONDS = 0.5


class StatusLine:
    """Calls `text()` twice a second in a thread of its own and shows what it returns."""

    def __init__(self, descriptor: int, text: Callable[[], str]) -> None:
        self._descriptor, self._text = descriptor, text
        self._stop = threading.Event()
        self._size = (0, 0)
        self._owner = os.getpid()
        self._thread = threading.Thread(target=self._run, name="flatout-status", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Give the last line back. Safe to call twice, and from a forked child (where it does nothing)."""
        if self._stop.is_set() or os.getpid() != self._owner:
            return
        self._stop.set()
        self._thread.join(timeout=2 * REFRESH_SECONDS)
        if self._size != (0, 0):
            rows, _ = self._size
            self._write(f"\x1b7\x1b[r\x1b[{rows};1H\x1b[2K\x1b8")

    def _run(self) -> None:
        while not self._stop.wait(REFRESH_SECONDS):
            self._draw()

    def _draw(self) -> None:
        try:
            columns, rows = os.get_terminal_size(self._descriptor)
        except OSError:  # the terminal is gone; the script is not
            self._stop.set()
            return
        if rows < 4 or columns < 20:
            return
        start = ""
        if self._size != (rows, columns):
            # One line down and up again first (an index, which keeps the column, unlike a line feed): the cursor may
            # stand on the line that is about to be taken.
            start = f"\x1bD\x1b[1A\x1b7\x1b[1;{rows - 1}r\x1b8"
            self._size = (rows, columns)
        line = "".join(letter for letter in self._text() if letter.isprintable())[: columns - 1]
        self._write(f"{start}\x1b7\x1b[{rows};1H\x1b[2K\x1b[7m{line}\x1b[0m\x1b8")

    def _write(self, text: str) -> None:
        try:
            os.write(self._descriptor, text.encode())  # one write: the script's own cannot come between
        except OSError:
            self._stop.set()
