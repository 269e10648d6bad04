"""The folder in which trials have their scratch directories, logs and configurations; removed by its owner.

    with work_folder() as folder:
        ...                                   # its process holds a lock on it for as long

An owner that is killed cannot remove its folder. The next one does: a folder with our mark that no process has locked,
and that belongs to this user, is a leftover. Whatever cannot be removed safely is left alone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from flatout.errors import MachineError, TrialError
from flatout.file_locks import lock_now
from flatout.script.isolation import cleanup
from flatout.temporary_folders import MARK, PREFIXES, lock_and_mark

PREFIX = "flatout-trials-"
UNFINISHED = "flatout-new-"
"""The name until the lock is taken, so that a folder in the making is not mistaken for a leftover."""
LOCKED = (PREFIX, UNFINISHED, *PREFIXES)
"""What the names of all folders begin with that their process locks."""


@contextlib.contextmanager
def work_folder(parent: Path | None = None) -> Iterator[Path]:
    """A new folder below `parent`, by default on a disk rather than in memory, because trials may write checkpoints."""
    require_linux()
    parent = parent or _parent()
    sweep(parent)
    folder, lock = _make(parent)
    with contextlib.ExitStack() as owned:
        owned.callback(os.close, lock)
        try:
            yield folder
        finally:
            with contextlib.suppress(TrialError):  # the next owner tries again; the result of minutes counts for more
                cleanup(folder)


def require_linux() -> None:
    """MachineError on other systems, before any of the script has run: trials need Linux for isolation."""
    if not sys.platform.startswith("linux"):
        there = {"darwin": "macOS", "win32": "Windows"}.get(sys.platform, sys.platform)
        windows = "run it inside WSL 2 (wsl --install)"
        raise MachineError(
            f"scripts cannot be tried on {there}",
            limit="Linux namespaces keep a trial from your files and the network; the library works here",
            remedy=windows
            if sys.platform == "win32"
            else f"use Linux, in a virtual machine for example; on Windows {windows}",
        )


def sweep(parent: Path) -> list[Path]:
    """Remove what killed owners left below `parent`; returns what was removed."""
    removed = []
    for path in _candidates(parent):
        with contextlib.suppress(OSError, TrialError):
            if remove_leftover(path):
                removed.append(path)
    return removed


def leftover_folders(parent: Path) -> list[Path]:
    """What `sweep` would remove."""
    found = []
    for path in _candidates(parent):
        with contextlib.suppress(OSError), _ours_and_free(path) as free:
            if free:
                found.append(path)
    return found


def remove_leftover(path: Path) -> bool:
    """Remove one; False where it is not ours, has no mark, or its owner is alive. Raises OSError or TrialError."""
    with _ours_and_free(path) as free:
        if free:
            cleanup(path, attempts=1)
        return free


def _candidates(parent: Path) -> list[Path]:
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        return sorted(Path(entry.path) for entry in entries if entry.name.startswith(LOCKED))
    return []


def _parent() -> Path:
    for place in ("/var/tmp", tempfile.gettempdir()):
        if os.path.isdir(place) and os.access(place, os.W_OK | os.X_OK):
            return Path(place)
    raise MachineError(
        f"neither /var/tmp nor {tempfile.gettempdir()} can be written to",
        limit="trials need a folder for what the script writes",
        remedy="set TMPDIR to a folder on a disk with free space",
    )


def _make(parent: Path) -> tuple[Path, int]:
    try:
        unfinished = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=parent))
        lock = lock_and_mark(unfinished)
        folder = parent / (PREFIX + unfinished.name.removeprefix(UNFINISHED))
        unfinished.rename(folder)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
            raise
        raise MachineError(
            f"cannot make a folder for trials in {parent}: {error.strerror}",
            remedy="free some space there, or set TMPDIR to a folder on another disk",
        ) from error
    return folder, lock


@contextlib.contextmanager
def _ours_and_free(path: Path) -> Iterator[bool]:
    """Whether it is a folder of this user's with our mark and no owner; its lock is held meanwhile."""
    opened = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield os.fstat(opened).st_uid == os.getuid() and _is_marked(opened) and lock_now(opened)
    finally:
        os.close(opened)


def _is_marked(folder: int) -> bool:
    try:
        return stat.S_ISREG(os.stat(MARK, dir_fd=folder, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False
