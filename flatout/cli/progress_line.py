"""What long work is doing: one line of the terminal, or a line a minute where stderr is a log."""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator

from flatout.terminal import is_terminal
from flatout.units import format_seconds

LOG_SECONDS = 60.0


@contextlib.contextmanager
def progress_line() -> Iterator[Callable[[str], None]]:
    """One line on a terminal's stderr that is rewritten. Elsewhere (nohup, a batch system, CI) a line at most once a
    minute, and none of work that takes less."""
    if not is_terminal(sys.stderr):
        yield _log_line()
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


def _log_line() -> Callable[[str], None]:
    began = last = time.monotonic()

    def show(text: str) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < LOG_SECONDS or sys.stderr is None:
            return
        last = now
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more, or it is closed
            print(f"flatout, after {format_seconds(now - began)}: {text}", file=sys.stderr, flush=True)

    return show
