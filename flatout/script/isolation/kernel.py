"""The few system calls that Python does not offer, as functions that raise OSError.

Nothing is looked up at import: `ctypes` finds a call when it is first made, so this file imports on any system.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
from collections.abc import Iterable

from flatout.errors import MachineError

CLONE_NEWNS = 0x00020000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8

MS_RDONLY = 0x1
MS_REMOUNT = 0x20
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
MNT_DETACH = 2

# Capabilities (linux/capability.h) with which a root script could step around its namespaces, or change the machine.
ESCAPING_CAPABILITIES = {
    2: "DAC_READ_SEARCH",  # open files by handle, whatever is mounted
    12: "NET_ADMIN",  # with --allow-network the network is the machine's
    16: "SYS_MODULE",
    17: "SYS_RAWIO",
    19: "SYS_PTRACE",  # /proc/<pid>/root of a process outside
    21: "SYS_ADMIN",  # unmount the layers
    22: "SYS_BOOT",
    25: "SYS_TIME",
    27: "MKNOD",  # a device node for the disk itself
    32: "MAC_OVERRIDE",
    33: "MAC_ADMIN",
    39: "BPF",
    40: "CHECKPOINT_RESTORE",  # files of other processes through /proc
}
_CAPABILITY_VERSION_3 = 0x20080522
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_DUMPABLE = 4
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38

_MOUNT_SETATTR = 442  # the same number on every architecture
_MOUNT_ATTR_RDONLY, _AT_RECURSIVE, _AT_FDCWD = 1, 0x8000, ctypes.c_int(-100)

# The C library's own functions are called, because importing `socket` and `fcntl` would show in the user's script.
_AF_INET, _SOCK_DGRAM, _SOCK_CLOEXEC = 2, 2, 0o2000000
_SIOCSIFFLAGS, _IFF_UP, _IFF_RUNNING = 0x8914, 0x1, 0x40


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


def make_read_only(target: str, flags: int) -> None:
    """Of one mount, not of those below it; `flags` are those it has and keeps."""
    mount("none", target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | flags)


def make_all_read_only(target: str) -> None:
    """Of a mount and all below it, in one call; OSError before Linux 5.12."""
    attributes = struct.pack("=QQQQ", _MOUNT_ATTR_RDONLY, 0, 0, 0)
    path, size = os.fsencode(target), ctypes.c_size_t(len(attributes))
    system_call(_MOUNT_SETATTR, _AT_FDCWD, path, ctypes.c_uint(_AT_RECURSIVE), attributes, size)


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
    dropped = (1 << 64) - 1 if numbers is None else sum(1 << number for number in numbers)
    for position in range(6):
        sets[position] &= ~(dropped >> (32 * (position // 3))) & 0xFFFFFFFF
    _call("capset", header, sets)


def die_with_parent(signal_number: int) -> None:
    """This process gets the signal when the thread that started it ends. Dropping capabilities may undo this."""
    _call("prctl", _PR_SET_PDEATHSIG, ctypes.c_ulong(signal_number), 0, 0, 0)


def adopt_orphans() -> None:
    """Descendants whose parent ends become children of this process instead of the system's first one."""
    _call("prctl", _PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1), 0, 0, 0)


def bring_loopback_up() -> None:
    """In a network namespace that is new: 127.0.0.1 and ::1 answer, and nothing else does."""
    endpoint = _call("socket", _AF_INET, _SOCK_DGRAM | _SOCK_CLOEXEC, 0)
    try:
        _call("ioctl", endpoint, ctypes.c_ulong(_SIOCSIFFLAGS), struct.pack("16sh14x", b"lo", _IFF_UP | _IFF_RUNNING))
    finally:
        os.close(endpoint)


def system_call(number: int, *arguments: object) -> int:
    """A system call for which the C library has no function."""
    return _call("syscall", ctypes.c_long(number), *arguments)
