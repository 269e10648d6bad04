"""Folders that are needed for a while, below the temporary one: `flatout clean` finds those whose process was killed.

with temporary_folder("profile") as folder:    # /tmp/flatout-profile-x3a9k2
    ...                                        # removed at the end, locked for as long
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args

from flatout.file_locks import lock_now

Kind = Literal["tune", "profile", "run", "preflight", "input"]
MARK = "made-by-flatout"
"""A file in a folder that is locked while its process runs: without it nobody knows whether it is in use."""
PREFIXES = tuple(f"flatout-{kind}-" for kind in get_args(Kind))


def lock_and_mark(folder: str | Path) -> int:
    """Its lock, held until this descriptor is closed. OSError where there are no such locks, as on Windows."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        if lock_now(lock):
            Path(folder, MARK).touch()
    except OSError:
        os.close(lock)
        raise
    return lock


@contextlib.contextmanager
def temporary_folder(kind: Kind) -> Iterator[Path]:
    """A new one, for this user alone."""
    with tempfile.TemporaryDirectory(prefix=f"flatout-{kind}-") as name, contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):  # such a folder is then left unmarked, and never taken for a leftover
            held.callback(os.close, lock_and_mark(name))
        yield Path(name)
