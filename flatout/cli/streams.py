"""The standard streams of verbs: progress on stderr, a copy of stdin for trials, stdout for the verb's answer alone."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from flatout.errors import UsageError
from flatout.temporary_folders import temporary_folder
from flatout.terminal import Notice, is_terminal, tell
from flatout.units import format_seconds

LOG_SECONDS = 60.0
STDIN_LIMIT_BYTES = 64 << 20
PATIENCE_SECONDS = 5.0
WAITING = "waiting for standard input to end, as every trial gets a copy; for no input, use: < /dev/null"


@contextlib.contextmanager
def progress_line() -> Iterator[Callable[[str], None]]:
    """One line on a terminal's stderr that is rewritten. Elsewhere (nohup, a batch system, CI) a line at most once a
    minute, and none of work that takes less. A Notice stays, and is always printed."""
    if not is_terminal(sys.stderr):
        yield _log_line()
        return

    def show(text: str) -> None:
        width = shutil.get_terminal_size().columns - 1
        sys.stderr.write(f"\r\x1b[K{text}\n" if isinstance(text, Notice) else f"\r\x1b[K{text[:width]}")
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
        if (now - last < LOG_SECONDS and not isinstance(text, Notice)) or sys.stderr is None:
            return
        last = now
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more, or it is closed
            print(f"flatout, after {format_seconds(now - began)}: {text}", file=sys.stderr, flush=True)

    return show


@contextlib.contextmanager
def stdin_copy() -> Iterator[Path | None]:
    """What is piped in is kept, so that every trial can read it; a terminal is not: trials then read nothing."""
    if sys.stdin is None or sys.stdin.closed or sys.stdin.isatty() or not _is_pipe_or_file(sys.stdin.fileno()):
        yield None
        return
    with temporary_folder("input") as folder:
        if not select.select([sys.stdin], [], [], PATIENCE_SECONDS)[0]:
            tell(WAITING)
        data = sys.stdin.buffer.read(STDIN_LIMIT_BYTES + 1)
        if len(data) > STDIN_LIMIT_BYTES:
            raise UsageError("more than 64 MiB on standard input", limit="trials each need a copy", remedy="use a file")
        copy = folder / "stdin"
        copy.write_bytes(data)
        yield copy


def _is_pipe_or_file(descriptor: int) -> bool:
    mode = os.fstat(descriptor).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """What the user's own code prints meanwhile goes to stderr; also what code in C and other processes write, which
    know the descriptor alone."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or replaced
        sys.stdout.flush()
    kept: int | None = None
    with contextlib.suppress(OSError):  # a descriptor is closed (`>&-`)
        kept = os.dup(1)
        os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        if kept is not None:
            os.dup2(kept, 1)
            os.close(kept)
