"""Folders that appear whole or not at all: written under another name, flushed to the disk, renamed.

A rename is atomic, but may reach the disk before the data that it names: so the files, their folder and, after the
rename, the folder above are each flushed with fsync. An unfinished folder is held by a lock; one whose lock is free
was left by a process that died, and the next save deletes it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from flatout.errors import FlatoutError, MachineError, UsageError
from flatout.file_locks import lock_now
from flatout.units import format_bytes

UNFINISHED, DISCARDED = ".unfinished-", ".discarded-"
"""Prefixes of unfinished folders, and of folders being deleted."""
LOCK = "lock"
CHUNK_BYTES = 8 * 1024**2
_FULL = {errno.ENOSPC, errno.EDQUOT}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG}


class HashedFile:
    """A new file whose size and SHA-256 are known when its last byte is written. Every method raises OSError."""

    def __init__(self, descriptor: int) -> None:
        self.size_bytes = 0
        self._descriptor, self._hash = descriptor, hashlib.sha256()

    def write(self, content: bytes | memoryview) -> None:
        """Append all of it."""
        left = memoryview(content).cast("B") if len(content) else memoryview(b"")
        while left:
            written = os.write(self._descriptor, left[:CHUNK_BYTES])
            self._hash.update(left[:written])
            self.size_bytes += written
            left = left[written:]

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()


@contextlib.contextmanager
def hashed_file(path: Path) -> Iterator[HashedFile]:
    """A file that is on the disk, not only in the kernel's memory, when the block ends. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        file = HashedFile(descriptor)
        yield file
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """The checksum of a file as it is now. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def whole_folder(parent: Path, name: str) -> Iterator[Path]:
    """A folder to fill; it becomes parent/name when the block ends well, and is gone if anything fails.

    Raises OSError; also when parent/name exists.
    """
    parent.mkdir(parents=True, exist_ok=True)
    place = parent / f"{UNFINISHED}{name}-{uuid.uuid4().hex[:12]}"
    with contextlib.ExitStack() as always, contextlib.ExitStack() as on_failure:
        on_failure.callback(shutil.rmtree, place, ignore_errors=True)
        place.mkdir()
        always.callback(os.close, _hold(place))
        yield place
        _sync_folder(place)
        os.rename(place, parent / name)
        on_failure.callback(shutil.rmtree, parent / name, ignore_errors=True)
        _sync_folder(parent)
        on_failure.pop_all()
        with contextlib.suppress(OSError):  # not before: without its lock, a folder that is unfinished is abandoned
            (parent / name / LOCK).unlink()


def remove_folder(folder: Path) -> None:
    """Renamed in one step, then deleted: a crash half-way leaves no partial folder under its name. Raises OSError."""
    discarded = folder.with_name(f"{DISCARDED}{folder.name}-{uuid.uuid4().hex[:12]}")
    os.rename(folder, discarded)
    shutil.rmtree(discarded)


def abandoned_folders(parent: Path) -> list[Path]:
    """Folders that a process left unfinished when it died; those still being written are not among them."""
    return [path for path in _entries(parent) if path.name.startswith(UNFINISHED) and _is_abandoned(path)]


def sweep(parent: Path) -> None:
    """Delete what dead processes left. Does not fail: what cannot be deleted stays."""
    leftovers = [path for path in _entries(parent) if path.name.startswith(DISCARDED)]
    for path in [*leftovers, *abandoned_folders(parent)]:
        shutil.rmtree(path, ignore_errors=True)


def _entries(parent: Path) -> list[Path]:
    try:
        return sorted(parent.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _hold(place: Path) -> int:
    """A descriptor that keeps the folder's lock until it is closed, or its process dies."""
    descriptor = os.open(place / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    with contextlib.suppress(OSError):  # a file system without locks: nothing is taken for abandoned there
        lock_now(descriptor)
    return descriptor


def _is_abandoned(place: Path) -> bool:
    try:
        descriptor = os.open(place / LOCK, os.O_RDWR)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        return lock_now(descriptor)
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":  # Windows cannot open folders
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot fsync folders
            raise
    finally:
        os.close(descriptor)


def existing_in(folder: Path) -> Path | None:
    """The folder, or the nearest one above it that exists. UsageError for a path that cannot be."""
    try:
        return next((path for path in (folder, *folder.parents) if path.exists()), None)
    except OSError as error:  # a name that is too long, a folder above it that may not be searched
        what = f"{folder} cannot be used: {error.strerror}"
        raise UsageError(what, remedy="name a folder that you may write") from error


def check_space(folder: Path, need_bytes: int, what: str) -> None:
    """Raises MachineError if the disk under `folder` has less than that free, before anything is written."""
    free = _free_bytes(folder)
    if free is not None and free < need_bytes:
        raise _no_space(folder, need_bytes, free, what)


def write_error(error: OSError, folder: Path, need_bytes: int, what: str) -> FlatoutError:
    """The error for when `what` (a subject: 'the checkpoint of step 5') could not be written."""
    if error.errno in _FULL:
        return _no_space(folder, need_bytes, _free_bytes(folder), what)
    if error.errno == errno.ENOTEMPTY:
        return UsageError(
            f"{what} cannot be written to {folder}: another process has saved one there under the same name",
            limit="one run saves in a folder",
            remedy="give each run a folder of its own; ranks of one run call flatout.ranks() before the first save",
        )
    if error.errno in _FORBIDDEN:
        return UsageError(
            f"{what} cannot be written to {folder}: {error.strerror}", remedy="name a folder that you may write"
        )
    return MachineError(
        f"{what} could not be written to {folder}: {error.strerror or error}",
        limit="the checkpoints before it are untouched" if folder.is_dir() else "that folder is not there",
        remedy="check the disk, or name another folder",
    )


def _no_space(folder: Path, need_bytes: int, free_bytes: int | None, what: str) -> MachineError:
    free = "an unknown amount" if free_bytes is None else format_bytes(free_bytes)
    return MachineError(
        f"no space for {what}: it needs {format_bytes(need_bytes)} in {folder}",
        limit=f"{free} is free (a quota may allow less); the checkpoints before it are untouched",
        remedy="free some space, keep fewer (keep_last=, keep_best=), or name another folder",
    )


def _free_bytes(folder: Path) -> int | None:
    """Free space where the folder is, or will be; None if the system does not say."""
    try:
        existing = existing_in(folder.absolute())
        usage = None if existing is None else shutil.disk_usage(existing)
    except (OSError, UsageError):
        return None
    return usage.free if usage is not None and usage.total else None
