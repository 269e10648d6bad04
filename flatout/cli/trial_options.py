"""What verbs that run a script as a trial share: how it is kept apart from the machine, and what it reads."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

STDIN_LIMIT_BYTES = 64 << 20

IsolationOption = Annotated[
    str,
    typer.Option(
        "--isolation",
        metavar="MODE",
        help="How your files are kept from the script: auto, overlay (copy-on-write), guard (read-only).",
    ),
]
AllowNetworkOption = Annotated[
    bool,
    typer.Option(
        "--allow-network", help="Let the script use the network; by default it has only a loopback interface."
    ),
]


@contextlib.contextmanager
def stdin_copy() -> Iterator[Path | None]:
    """What is piped in is kept, so that every trial can read it; a terminal is not: trials then read nothing."""
    from flatout.errors import UsageError

    if sys.stdin is None or sys.stdin.closed or sys.stdin.isatty() or not _is_pipe_or_file(sys.stdin.fileno()):
        yield None
        return
    with tempfile.NamedTemporaryFile(prefix="flatout-stdin-") as copy:
        data = sys.stdin.buffer.read(STDIN_LIMIT_BYTES + 1)
        if len(data) > STDIN_LIMIT_BYTES:
            raise UsageError("more than 64 MiB on standard input", limit="trials each need a copy", remedy="use a file")
        copy.write(data)
        copy.flush()
        yield Path(copy.name)


def _is_pipe_or_file(descriptor: int) -> bool:
    import os
    import stat

    mode = os.fstat(descriptor).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)
