"""One copy-on-write layer: an overlay mount whose changes go to a directory of ours.

The kernel merges a lower directory (the user's, only read) with an upper one (ours): a file is copied up when it is
first opened for writing, a deletion is a marker in the upper directory. Reading copies nothing.

Upper directories lie in the scratch, on its disk. Two things do not work there, and go to memory, with a bound:
a layer over a directory that holds the scratch itself (an upper directory inside its own lower one is refused), and
every layer when the scratch lies on a file system that cannot carry one (another overlay, as in Docker; NFS).
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from flatout.errors import MachineError
from flatout.machine.detect import available_memory_bytes

from . import kernel
from .scratch import LAYERS, MEMORY, ROOT

SOURCE = "flatout"  # how our mounts are told from others in mountinfo
MEMORY_SHARE = 4  # the memory-backed layers may hold a quarter of the memory that is available now

# redirect_dir: a directory may be renamed. metacopy: chmod copies no data. Neither is allowed in a user namespace,
# where userxattr puts the markers into attributes that an ordinary user may write. volatile: nothing has to survive a
# crash, so no layer waits at the trial's end until the whole disk is written out; fsync is free then.
_OPTIONS_AS_ROOT = (",redirect_dir=on,metacopy=on,volatile", ",redirect_dir=on,metacopy=on", ",redirect_dir=on", "")
_OPTIONS_AS_USER = (",userxattr,volatile", ",userxattr")


class Layers:
    """Makes layers, each with an upper and a work directory of its own."""

    def __init__(self, scratch: Path, *, as_user: bool) -> None:
        self.disk = scratch / LAYERS
        self.memory = scratch / MEMORY
        self.memory_bytes = available_memory_bytes() // MEMORY_SHARE
        self.as_user = as_user
        self._made = 0
        size = f"size={self.memory_bytes},mode=0700"
        kernel.mount(SOURCE, str(self.memory), "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, size)
        self.nothing = self.memory / "nothing"
        self.nothing.touch(mode=0o400)
        self._options = ""
        self._find_options(str(scratch / ROOT))
        self.disk_refusal = self._refusal_of_disk(str(scratch / ROOT))

    def mount_in_memory(self, lower: str, target: str, flags: int, size_bytes: int) -> None:
        """The same, in memory of its own; it holds at most `size_bytes`, of which none is taken before it is used."""
        base = self.memory / f"{self._made}-memory"
        base.mkdir()
        kernel.mount(SOURCE, str(base), "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, f"size={size_bytes},mode=0700")
        self.mount(lower, target, flags, base)

    def mount(self, lower: str, target: str, flags: int, base: Path) -> None:
        """Lay a copy-on-write layer of `lower` over `target`; changes go to `base`: `disk` or `memory`. OSError where
        the kernel refuses it."""
        upper, work = base / f"{self._made}-upper", base / f"{self._made}-work"
        self._made += 1
        upper.mkdir()
        work.mkdir()
        self._imitate(lower, upper)
        opened = [os.open(path, os.O_PATH | os.O_DIRECTORY) for path in (lower, upper, work)]
        try:
            # Descriptors instead of paths: a comma, colon or backslash would have a meaning among these options.
            layout = "lowerdir=/proc/self/fd/{},upperdir=/proc/self/fd/{},workdir=/proc/self/fd/{}".format(*opened)
            kernel.mount(SOURCE, target, "overlay", flags, layout + self._options)
        finally:
            for number in opened:
                os.close(number)

    def _imitate(self, lower: str, upper: Path) -> None:
        """The upper directory's owner, mode and time are what the script sees of the merged one."""
        status = os.stat(lower)
        mode = stat.S_IMODE(status.st_mode)
        if not self.as_user:
            os.chown(upper, status.st_uid, status.st_gid)
        elif not os.access(lower, os.W_OK):
            mode &= ~0o222  # the upper directory is this user's own, and must refuse writes all the same
        os.chmod(upper, mode)
        os.utime(upper, ns=(status.st_atime_ns, status.st_mtime_ns))

    def _find_options(self, target: str) -> None:
        """The best that the kernel accepts."""
        refusal: OSError | None = None
        for options in _OPTIONS_AS_USER if self.as_user else _OPTIONS_AS_ROOT:
            self._options = options
            try:
                self._try(target, self.memory)
                return
            except OSError as error:
                refusal = error
        raise MachineError(f"the kernel refuses an overlay mount ({refusal})")

    def _refusal_of_disk(self, target: str) -> str:
        try:
            self._try(target, self.disk)
            return ""
        except OSError as error:
            return str(error)

    def _try(self, target: str, base: Path) -> None:
        lower = self.memory / f"lower-{self._made}"
        lower.mkdir()
        self.mount(str(lower), target, 0, base)
        kernel.unmount(target)
