"""What a long search is doing, in one line of the terminal."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterator

from flatout.terminal import is_terminal


@contextlib.contextmanager
def progress_line() -> Iterator[Callable[[str], None]]:
    """One line on a terminal's stderr that is rewritten; nothing elsewhere."""
    if not is_terminal(sys.stderr):
        yield lambda text: None
        return

    def show(text: str) -> None:
        width = shutil.get_terminal_size().columns - 1
        sys.stderr.write(f"\r\x1b[K{text[:width]}")
        sys.stderr.flush()

    try:
        yield show
    finally:
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()
