"""Standard input for verbs that run a script several times."""

from __future__ import annotations

import contextlib
import os
import select
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from flatout.errors import UsageError

STDIN_LIMIT_BYTES = 64 << 20
PATIENCE_SECONDS = 5.0
WAITING = "waiting for standard input to end, as every trial gets a copy; for no input, use: < /dev/null\n"


@contextlib.contextmanager
def stdin_copy() -> Iterator[Path | None]:
    """What is piped in is kept, so that every trial can read it; a terminal is not: trials then read nothing."""
    if sys.stdin is None or sys.stdin.closed or sys.stdin.isatty() or not _is_pipe_or_file(sys.stdin.fileno()):
        yield None
        return
    with tempfile.NamedTemporaryFile(prefix="flatout-stdin-") as copy:
        if not select.select([sys.stdin], [], [], PATIENCE_SECONDS)[0]:
            sys.stderr.write(WAITING)
        data = sys.stdin.buffer.read(STDIN_LIMIT_BYTES + 1)
        if len(data) > STDIN_LIMIT_BYTES:
            raise UsageError("more than 64 MiB on standard input", limit="trials each need a copy", remedy="use a file")
        copy.write(data)
        copy.flush()
        yield Path(copy.name)


def _is_pipe_or_file(descriptor: int) -> bool:
    mode = os.fstat(descriptor).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)
