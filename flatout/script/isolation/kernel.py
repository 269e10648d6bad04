"""The few system calls that Python does not offer, as functions that raise OSError.

Nothing is looked up at import: `ctypes` finds a call when it is first made, so this file imports on any system.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterable

from flatout.errors import MachineError

CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000

MS_RDONLY = 0x1
MS_REMOUNT = 0x20
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
MNT_DETACH = 2

# Capabilities (linux/capability.h) with which a root script could step around its mount namespace.
ESCAPING_CAPABILITIES = {
    2: "DAC_READ_SEARCH",  # open files by handle, whatever is mounted
    16: "SYS_MODULE",
    17: "SYS_RAWIO",
    19: "SYS_PTRACE",  # /proc/<pid>/root of a process outside
    21: "SYS_ADMIN",  # unmount the layers
    27: "MKNOD",  # a device node for the disk itself
}
_CAPABILITY_VERSION_3 = 0x20080522
_PR_SET_DUMPABLE = 4
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: object) -> int:
    function = getattr(_libc(), name, None)
    if function is None:
        raise MachineError(f"this system has no {name}()", limit="private mounts need Linux")
    result = int(function(*arguments))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def unshare(flags: int) -> None:
    _call("unshare", ctypes.c_int(flags))


def mount(source: str, target: str, filesystem: str | None, flags: int = 0, options: str = "") -> None:
    """mount(2). Paths go in as they are: spaces, commas and colons need no escaping here."""
    _call(
        "mount",
        os.fsencode(source),
        os.fsencode(target),
        filesystem.encode() if filesystem else None,
        ctypes.c_ulong(flags),
        options.encode(),
    )


def bind(source: str, target: str, *, recursive: bool = False) -> None:
    mount(source, target, None, MS_BIND | (MS_REC if recursive else 0))


def unmount(target: str) -> None:
    """Take a mount out of the tree; it lives on for as long as something uses it."""
    _call("umount2", os.fsencode(target), MNT_DETACH)


def pivot_root(new_root: str) -> None:
    """Make a mount the root of this namespace and let go of the old one (the chdir is the caller's)."""
    os.chdir(new_root)
    _call("pivot_root", b".", b".")  # the old root is now stacked on the new one
    unmount(".")
    os.chdir("/")


def allow_own_proc_files() -> None:
    """A process that has changed its user may not write its own /proc/self/uid_map until it says it is dumpable."""
    _call("prctl", _PR_SET_DUMPABLE, 1, 0, 0, 0)


def refuse_new_privileges() -> None:
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def drop_capabilities(numbers: Iterable[int] | None) -> None:
    """Give up capabilities for good, here and in every program started from here. None: all that this process holds."""
    for number in ESCAPING_CAPABILITIES if numbers is None else numbers:
        try:
            _call("prctl", _PR_CAPBSET_DROP, ctypes.c_ulong(number), 0, 0, 0)
        except OSError:
            continue  # no right to change the bound means no such capability to lose either
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable for the low 32; the same for the high 32
    _call("capget", header, sets)
    keep = 0 if numbers is None else ~sum(1 << number for number in numbers) & 0xFFFFFFFF
    for position in range(6):
        sets[position] &= keep if position < 3 or numbers is None else 0xFFFFFFFF
    _call("capset", header, sets)


def system_call(number: int, *arguments: object) -> int:
    """A system call for which the C library has no function."""
    return _call("syscall", ctypes.c_long(number), *arguments)
