"""A status line at the foot of a terminal, beneath a script that owns the rest of it.

The terminal is told to scroll all lines but the last (a DECSTBM region, as package managers do for their progress), so
whatever the script writes, progress bars with carriage returns too, stays its own. Nothing of the script's output is
read or redirected. Only for a terminal: the caller checks.

A process can die without cleaning up (SIGKILL, `os._exit`, the kernel's out-of-memory killer) and would leave the user
a terminal that scrolls wrongly, so a shell that waits for the process's end gives the line back then.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Callable

REFRESH_SECONDS = 0.5

_GIVE_BACK = "\\0337\\033[r\\033[%d;1H\\033[2K\\0338"
"""For `printf`: save the cursor, scroll the whole screen again, clear the last line, restore the cursor."""


class StatusLine:
    """Calls `text()` twice a second in a thread of its own and shows what it returns."""

    def __init__(self, descriptor: int, text: Callable[[], str]) -> None:
        self._descriptor, self._text = descriptor, text
        self._stop = threading.Event()
        self._size = (0, 0)
        self._owner = os.getpid()
        self._lifeline: tuple[int, int] | None = None
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
            self._write((_GIVE_BACK % rows).encode().decode("unicode_escape"))
        if self._lifeline is not None:
            descriptor, inode = self._lifeline
            with contextlib.suppress(OSError):
                if os.fstat(descriptor).st_ino == inode:  # the script may have closed it, and opened another
                    os.write(descriptor, b"done\n")

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
        if self._size == (0, 0):
            self._leave_heir()
        if self._size != (rows, columns):
            # One line down and up again first (an index, which keeps the column, unlike a line feed): the cursor may
            # stand on the line that is about to be taken.
            start = f"\x1bD\x1b[1A\x1b7\x1b[1;{rows - 1}r\x1b8"
            self._size = (rows, columns)
        line = "".join(letter for letter in self._text() if letter.isprintable())[: columns - 1]
        self._write(f"{start}\x1b7\x1b[{rows};1H\x1b[2K\x1b[7m{line}\x1b[0m\x1b8")

    def _leave_heir(self) -> None:
        """Start the shell that waits on a pipe: a word means that all is done, its end that this process died.

        It is nobody's child for long, so a script that waits for its children never meets it.
        """
        ours, theirs = os.pipe()
        wait = f"exec 3<&0; {{ read word <&3 || printf '{_GIVE_BACK % 9999}'; }} &"
        try:
            shell = subprocess.Popen(
                ["/bin/sh", "-c", wait],
                stdin=ours,
                stdout=self._descriptor,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            shell.wait()
            self._lifeline = theirs, os.fstat(theirs).st_ino
        except OSError:  # no shell: then only an orderly end gives the line back
            os.close(theirs)
        finally:
            os.close(ours)

    def _write(self, text: str) -> None:
        try:
            os.write(self._descriptor, text.encode())  # one write: the script's own cannot come between
        except OSError:
            self._stop.set()
