"""A few status lines at the foot of a terminal, beneath a script that owns the rest of it.

The terminal is told to scroll all lines but the last ones (a DECSTBM region, as package managers do for their
progress), so whatever the script writes, progress bars with carriage returns and prompts too, stays its own. Nothing of
the script's output is read or redirected. Only for a terminal: the caller checks.

A process can die without cleaning up (SIGKILL, `os._exit`, the kernel's out-of-memory killer) and would leave the user
a terminal that scrolls wrongly, so a shell that waits for the process's end gives the lines back then.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Callable, Sequence

from flatout.report.live_text import fitted

REFRESH_SECONDS = 0.5
MOST_LINES, MOST_SHARE = 12, 0.25
"""Of the rows of a terminal; three in any case."""
ROWS_FOR_ALL = 16
"""On a terminal with fewer rows there is one status line."""
LEAST_ROWS, LEAST_COLUMNS = 4, 20

_SHELL = r"""
exec 3<&0
{
    lines=0
    while read word <&3; do
        [ "$word" = done ] && exit
        lines=$word
    done
    text='\0337\033[r\033[9999;1H\033[2K'
    while [ "$lines" -gt 1 ]; do
        text="$text\033[1A\033[2K"
        lines=$((lines - 1))
    done
    printf "$text\0338"
} &
"""
"""Reads how many lines are taken, each time that this changes; a word says that all is done, the end of its input that
the process died. Then, for a terminal of any height: save the cursor, scroll the whole screen again, clear the last
lines, restore the cursor."""


class Panel:
    """Calls `lines(columns, most)` twice a second in a thread of its own and shows what it returns: at least one line
    and at most `most`, each of at most so many cells."""

    def __init__(self, descriptor: int, lines: Callable[[int, int], Sequence[str]]) -> None:
        self._descriptor, self._lines = descriptor, lines
        self._stop = threading.Event()
        self._size = (0, 0)
        self._height = 0
        self._owner = os.getpid()
        self._lifeline: tuple[int, int] | None = None
        self._thread = threading.Thread(target=self._run, name="flatout-status", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Give the lines back. Safe to call twice, and from a forked child (where it does nothing)."""
        if self._stop.is_set() or os.getpid() != self._owner:
            return
        self._stop.set()
        self._thread.join(timeout=2 * REFRESH_SECONDS)
        if self._size != (0, 0):
            self._write(f"\x1b7\x1b[r{self._cleared()}\x1b8")
        self._send("done")

    def _run(self) -> None:
        while not self._stop.wait(REFRESH_SECONDS):
            try:
                self._draw()
            except Exception:  # a defect of ours must not print a traceback into the script's output
                return

    def _draw(self) -> None:
        try:
            columns, rows = os.get_terminal_size(self._descriptor)
        except OSError:  # the terminal is gone; the script is not
            self._stop.set()
            return
        if rows < LEAST_ROWS or columns < LEAST_COLUMNS or self._in_background():
            return
        most = max(3, min(MOST_LINES, int(MOST_SHARE * rows))) if rows >= ROWS_FOR_ALL else 1
        lines = [fitted(line, columns - 1) for line in self._lines(columns - 1, most)][:most]
        start = self._take(rows, columns, len(lines))
        first = rows - self._height + 1
        shown = [f"\x1b[{first + place};1H\x1b[2K{line}" for place, line in enumerate(_padded(lines, self._height))]
        self._write(f"{start}\x1b7{''.join(shown)}\x1b8")

    def _take(self, rows: int, columns: int, height: int) -> str:
        """What keeps so many lines from scrolling; '' where they are. Lines are not given back while the size of the
        terminal stays: text that moves up and down would not be calm."""
        same = self._size == (rows, columns)
        height = max(height, self._height) if same else height
        if same and height == self._height:
            return ""
        more = height - self._height if same else height
        cleared = f"\x1b7{self._cleared()}\x1b8" if same else ""
        if self._lifeline is None and self._size == (0, 0):
            self._leave_shell()
        self._size, self._height = (rows, columns), height
        self._send(str(height))
        # So many lines down and up again first (indexes, which keep the column, unlike line feeds): the cursor may
        # stand on a line that is about to be taken.
        room = "\x1bD" * more + f"\x1b[{more}A"
        return f"{cleared}{room}\x1b7\x1b[1;{rows - height}r\x1b8"

    def _cleared(self) -> str:
        rows = self._size[0]
        return "".join(f"\x1b[{row};1H\x1b[2K" for row in range(rows - self._height + 1, rows + 1))

    def _in_background(self) -> bool:
        """Has the shell, or a pager that the script started, the terminal now? Then nothing is drawn over it."""
        try:
            return os.tcgetpgrp(self._descriptor) != os.getpgrp()
        except OSError:  # it does not control this process, so this is not known
            return False

    def _leave_shell(self) -> None:
        """Start the shell that waits on a pipe.

        It is nobody's child for long, so a script that waits for its children never meets it.
        """
        ours, theirs = os.pipe()
        try:
            shell = subprocess.Popen(
                ["/bin/sh", "-c", _SHELL],
                stdin=ours,
                stdout=self._descriptor,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            shell.wait()
            self._lifeline = theirs, os.fstat(theirs).st_ino
        except OSError:  # no shell: then only an orderly end gives the lines back
            os.close(theirs)
        finally:
            os.close(ours)

    def _send(self, word: str) -> None:
        if self._lifeline is None:
            return
        descriptor, inode = self._lifeline
        with contextlib.suppress(OSError):
            if os.fstat(descriptor).st_ino == inode:  # the script may have closed it, and opened another
                os.write(descriptor, f"{word}\n".encode())

    def _write(self, text: str) -> None:
        try:
            if os.isatty(self._descriptor):  # else the script has closed it, and the number may be a file's by now
                os.write(self._descriptor, text.encode())  # one write: the script's own cannot come between
        except OSError:
            self._stop.set()


def _padded(lines: Sequence[str], height: int) -> list[str]:
    """The first line stands out."""
    shown = [f"\x1b[7m{line}\x1b[0m" if place == 0 else line for place, line in enumerate(lines)]
    return [*shown, *[""] * (height - len(lines))]
