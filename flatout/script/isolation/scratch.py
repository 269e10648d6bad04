"""The scratch directory of one trial: what lies in it, and its removal.

    layers/   upper and work directories of the overlays; hidden from the trial itself
    memory/   where the memory-backed layers are mounted, inside the trial's namespace only
    root/     where the trial's new root is put together, inside the trial's namespace only
    tmp/      TMPDIR in guard mode

The kernel keeps directories of mode 000 in the work directories, so an ordinary recursive removal stops there.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from pathlib import Path

from flatout.errors import TrialError

LAYERS, MEMORY, ROOT, TEMPORARY = "layers", "memory", "root", "tmp"


def prepare(scratch: Path) -> Path:
    """Make the directories above; returns the scratch with all links resolved."""
    scratch.mkdir(parents=True, exist_ok=True)
    resolved = scratch.resolve()
    for name in (LAYERS, MEMORY, ROOT, TEMPORARY):
        (resolved / name).mkdir(mode=0o700, exist_ok=True)
    return resolved


def cleanup(scratch: Path, *, attempts: int = 5) -> None:
    """Remove a scratch directory once its trial has ended. Follows no link and enters no other file system."""
    for attempt in range(attempts):
        try:
            if not os.path.lexists(scratch):
                return
            status = os.lstat(scratch)
            if not stat.S_ISDIR(status.st_mode):
                raise TrialError(f"{scratch} is not a directory", limit="a scratch directory is one, and not a link")
            _remove_contents(os.open(scratch, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW), status.st_dev, scratch)
            os.rmdir(scratch)
            return
        except OSError as error:
            # A worker that outlives its trial may still write and remove files: the next round removes what is left.
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EBUSY) or attempt == attempts - 1:
                remedy = "end the processes that still use it, then remove it by hand"
                raise TrialError(f"cannot remove {scratch}: {error}", remedy=remedy) from error
            time.sleep(0.1)


def _remove_contents(directory: int, device: int, shown: Path) -> None:
    """Empty an open directory and close it. Names are looked up in the open directory, so no link can lead away."""
    try:
        if os.fstat(directory).st_dev != device:
            raise TrialError(f"{shown} is a mount point", remedy=f"unmount it: umount {shown}")
        found = [(not stat.S_ISDIR(os.lstat(name, dir_fd=directory).st_mode), name) for name in os.listdir(directory)]
        for is_file, name in sorted(found):  # folders first: the mark of a work folder stays until all else is gone
            if not is_file:
                _remove_contents(_open_directory(name, directory), device, shown / name)
                os.rmdir(name, dir_fd=directory)
            else:
                os.unlink(name, dir_fd=directory)
    finally:
        os.close(directory)


def _open_directory(name: str, parent: int) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    try:
        opened = os.open(name, flags, dir_fd=parent)
        if os.access(".", os.R_OK | os.W_OK | os.X_OK, dir_fd=opened):
            return opened
        os.fchmod(opened, 0o700)
        return opened
    except PermissionError:
        os.chmod(name, 0o700, dir_fd=parent)  # the kernel's work/work, of mode 000
        return os.open(name, flags, dir_fd=parent)
