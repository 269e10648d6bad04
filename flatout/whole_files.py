"""Files that are replaced whole or not at all: after a crash or on a full disk the old file is still there.

with written_whole(path) as temporary:
    temporary.write_text(text)
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from flatout.errors import UsageError

SUFFIX = ".tmp"
"""Suffix of a temporary file, which stays if its process is killed while it writes."""
PRIVATE = 0o600


@contextlib.contextmanager
def written_whole(path: Path, *, mode: int | None = None, durable: bool = True) -> Iterator[Path]:
    """The path of a temporary file beside `path`, to write to. It is flushed to disk and replaces `path` when the block
    ends; if the block raises, it is deleted. Raises OSError of the file system, for the caller to explain. `mode`: its
    permissions; None: those of any new file, by the umask.

    Where `path` is a link, the file that it leads to is replaced; what is no file, such as /dev/null or a pipe, is
    written to. durable=False does not wait for the disk: readers still see a whole file, but a power failure may lose
    it."""
    if path.exists() and not path.is_file() and not path.is_dir():
        yield path  # as it is named: what /dev/stdout leads to has a path in name alone where it is a pipe
        return
    path = Path(os.path.realpath(path))
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-", suffix=SUFFIX)
    os.close(descriptor)
    temporary = Path(name)
    try:
        yield temporary
        if durable:
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
        # temporary files are private, and some writers create private files
        temporary.chmod(usual_mode() if mode is None else mode)
        temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def usual_mode() -> int:
    """Of a new file, as the user's umask has it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return 0o666 & ~mask


def can_be_written(path: Path) -> bool:
    """Can a file be written there? What is no file, such as /dev/null, is written to itself."""
    if os.path.exists(path) and not os.path.isfile(path):
        return not os.path.isdir(path) and os.access(path, os.W_OK)
    folder = os.path.dirname(os.path.realpath(path))
    return os.path.isdir(folder) and os.access(folder, os.W_OK)


def write_obstacle(path: Path) -> str:
    """Why no file can be written there; '' where one can."""
    if can_be_written(path):
        return ""
    if os.path.isdir(path):
        return f"{path} is a folder"
    folder = os.path.dirname(os.path.realpath(path))
    return f"{folder} takes no file" if os.path.isdir(folder) else f"there is no folder {folder}"


def check_no_input(out: Path, inputs: Iterable[Path], what: str, option: str = "--out") -> None:
    """UsageError if what is written would replace a file that is only read. what: to be written, such as 'the page'."""
    for one in inputs:
        # of devices and pipes nothing is replaced
        if out.is_file() and one.exists() and out.samefile(one):
            raise UsageError(
                f"{option} is {out}",
                limit=f"{what} would replace a file that is only read",
                remedy="name another file",
            )


@contextlib.contextmanager
def errors_named(path: Path, remedy: str = "") -> Iterator[None]:
    """What the file system refuses is a UsageError that names the file."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}", remedy=remedy) from error
