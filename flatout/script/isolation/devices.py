"""/dev, /sys and /proc of a trial: what a script needs of them, and nothing through which it could change the machine.

/dev        read-only and without device nodes, except character devices that are open to everyone or belong to an
            accelerator; so root cannot write to a disk behind its file system
/dev/pts    new: the user's terminals are out of reach
/dev/shm    a layer over the real one, in memory, of the same size: files there are seen, and changed only in it
/dev/mqueue new, as is everything else of the IPC namespace
/sys        read-only, control groups too
/proc       of the trial's own processes; kernel settings are read-only
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress

from . import kernel, mounts
from .layers import SOURCE, Layers

_ACCELERATORS = ("accel", "dri", "habanalabs", "hl", "infiniband", "kfd", "neuron", "nvidia", "nvmap", "nvhost")
_SETTINGS = ("acpi", "bus", "fs", "irq", "scsi", "sys", "sysrq-trigger")
_QUIET = kernel.MS_NOSUID | kernel.MS_NOEXEC


def lay_dev(root: str, layers: Layers) -> Iterator[str]:
    """Build root/dev out of /dev; yields the paths that stay writable, as they will be named in the trial."""
    inside = root + "/dev"
    kernel.bind("/dev", inside, recursive=True)
    _make_all_read_only(inside)
    flags = next((mount.flags for mount in mounts.visible(mounts.read(), inside) if mount.path == inside), 0)
    kernel.make_read_only(inside, kernel.MS_NODEV | kernel.MS_NOSUID | flags)
    for device in wanted_devices("/dev"):
        kernel.bind(device, root + device)
        yield device
    yield from _lay_terminals(inside)
    _lay_shared_memory(inside, layers)
    if os.path.isdir(inside + "/mqueue"):
        with suppress(OSError):  # it stays as it is: read-only
            kernel.mount("mqueue", inside + "/mqueue", "mqueue", _QUIET | kernel.MS_NODEV)
            yield "/dev/mqueue"


def lay_sys_and_proc(root: str) -> None:
    """/proc is the machine's own until one of the next two follows: a second is refused once parts of it are hidden."""
    kernel.bind("/sys", root + "/sys", recursive=True)
    _make_all_read_only(root + "/sys")
    kernel.bind("/proc", root + "/proc", recursive=True)


def make_settings_read_only() -> None:
    """The kernel's in /proc: all there is to do without a PID namespace. After the new root is made."""
    for name in _SETTINGS:
        path = f"/proc/{name}"
        if os.path.exists(path):
            kernel.bind(path, path, recursive=True)
            kernel.make_read_only(path, _QUIET | kernel.MS_NODEV)


def lay_own_proc(next_process: int) -> None:
    """To be called in the first process of a PID namespace, after the new root is in place.

    The process that it starts next gets that number if it can: no two trials must have the same, because files in
    shared caches are named after it. OSError where the kernel refuses a new /proc.
    """
    kernel.mount("proc", "/proc", "proc", _QUIET | kernel.MS_NODEV)
    with suppress(OSError), open("/proc/sys/kernel/ns_last_pid", "w") as last:
        last.write(str(next_process - 1))
    make_settings_read_only()


def proc_is_whole() -> bool:
    """Whether an ordinary user may mount /proc once more: only where nothing of it is hidden, as containers do."""
    empty = "/proc/sys/fs/binfmt_misc"  # made to be mounted on: nothing is hidden there
    return not any(
        mounts.is_below(mount.path, "/proc") and mount.path != empty for mount in mounts.visible(mounts.read())
    )


def _make_all_read_only(tree: str) -> None:
    try:
        kernel.make_all_read_only(tree)
    except OSError:
        for mount in mounts.visible(mounts.read(), tree):
            kernel.make_read_only(mount.path, mount.flags)


def wanted_devices(directory: str, *, within_accelerator: bool = False) -> Iterator[str]:
    """Paths of the character devices that a trial may use, of those below a directory such as /dev."""
    found: list[os.DirEntry[str]] = []
    with suppress(PermissionError), os.scandir(directory) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        if entry.is_symlink() or entry.name in ("ptmx", "shm", "pts", "mqueue"):
            continue
        of_accelerator = within_accelerator or entry.name.startswith(_ACCELERATORS)
        if entry.is_dir():
            if of_accelerator:
                yield from wanted_devices(entry.path, within_accelerator=True)
            continue
        try:
            mode = entry.stat().st_mode
        except FileNotFoundError:
            continue  # unplugged meanwhile
        if stat.S_ISCHR(mode) and (mode & 0o006 == 0o006 or of_accelerator):
            yield entry.path


def _lay_terminals(dev: str) -> Iterator[str]:
    pts, ptmx = dev + "/pts", dev + "/ptmx"
    if not os.path.isdir(pts):
        return
    with suppress(OSError):  # the real one stays, read-only: no new terminals can be made there
        kernel.mount("devpts", pts, "devpts", _QUIET, "newinstance,ptmxmode=0666,mode=0620")
        yield "/dev/pts"
        if not os.path.islink(ptmx):
            kernel.bind(pts + "/ptmx", ptmx)
            yield "/dev/ptmx"


def _lay_shared_memory(dev: str, layers: Layers) -> None:
    shm = dev + "/shm"
    if os.path.islink(shm) or not os.path.isdir(shm):
        return
    space = os.statvfs("/dev/shm")
    size_bytes = space.f_blocks * space.f_frsize
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    try:
        layers.mount_in_memory("/dev/shm", shm, flags, size_bytes)
    except OSError:  # nothing of the user's is seen then, and nothing can be changed
        kernel.mount(SOURCE, shm, "tmpfs", flags, f"size={size_bytes},mode=1777")
