"""Files that are there whole or not at all: a crash or a full disk leaves what was there before.

with written_whole(path) as temporary:
    temporary.write_text(text)
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

SUFFIX = ".tmp"
"""What a process leaves that is killed while it writes ends so."""
PRIVATE = 0o600


@contextlib.contextmanager
def written_whole(path: Path, *, mode: int = 0o644) -> Iterator[Path]:
    """A file beside `path` to be written by its name. It is flushed to the disk and takes the place of `path` when the
    block ends, and is gone where the block raises. Raises OSError, of the file system, for the caller to explain."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-", suffix=SUFFIX)
    os.close(descriptor)
    temporary = Path(name)
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        temporary.chmod(mode)  # temporary files are private, and some writers make theirs so
        temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
