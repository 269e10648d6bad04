"""What is mounted where, from /proc/self/mountinfo.

A line reads: id, parent, major:minor, root, path, mount options, optional fields, '-', type, source, super options.
Mounts form a tree; a mount hides what lies beneath its path, also an earlier mount at the very same path, so only
a walk from the root shows which of them a path can still reach.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

# The kernel's own trees, which devices.py lays.
KERNEL_TREES = ("/proc", "/sys", "/dev")

# Where no script keeps results: hardly ever written, and then little.
SYSTEM_TREES = ("/bin", "/boot", "/etc", "/lib", "/lib64", "/lost+found", "/nix", "/run", "/sbin", "/snap", "/usr")

# Flags that a remount must repeat, or the kernel takes it as a wish to clear them (refused in a user namespace).
_FLAGS = {"nosuid": 2, "nodev": 4, "noexec": 8, "noatime": 1024, "nodiratime": 2048, "relatime": 1 << 21}


@dataclass(frozen=True, kw_only=True)
class Mount:
    """One line of mountinfo."""

    identity: int
    parent: int
    path: str
    filesystem: str
    source: str
    writable: bool
    flags: int


def parse(mountinfo: str) -> list[Mount]:
    return [_parse_line(line) for line in mountinfo.splitlines() if line]


def read() -> list[Mount]:
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
        return parse(lines.read())


def _parse_line(line: str) -> Mount:
    fields = line.split(" ")
    separator = fields.index("-", 6)
    options = fields[5].split(",")
    return Mount(
        identity=int(fields[0]),
        parent=int(fields[1]),
        path=_unescape(fields[4]),
        filesystem=fields[separator + 1],
        source=_unescape(fields[separator + 2]),
        writable="rw" in options and "ro" not in fields[separator + 3].split(","),
        flags=sum(flag for name, flag in _FLAGS.items() if name in options),
    )


def _unescape(field: str) -> str:
    """Blank, tab, newline and backslash stand in mountinfo as three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda digits: chr(int(digits[1], 8)), field)


def visible(mounts: Iterable[Mount], root: str = "/") -> Iterator[Mount]:
    """The mounts that a path below `root` can reach, parents before children."""
    mounts = list(mounts)
    at_root = [mount for mount in mounts if mount.path == root]
    covered = {mount.parent for mount in at_root}
    tops = [mount for mount in at_root if mount.identity not in covered]
    if tops:
        yield from _walk(tops[-1], mounts)


def _walk(mount: Mount, mounts: list[Mount]) -> Iterator[Mount]:
    children = [child for child in mounts if child.parent == mount.identity and child.identity != mount.identity]
    for child in children:
        if child.path == mount.path:  # stacked on top: the one beneath is out of reach, with all its children
            yield from _walk(child, mounts)
            return
    yield mount
    for child in sorted(children, key=lambda child: child.path):
        if not any(is_below(child.path, sibling.path) for sibling in children):
            yield from _walk(child, mounts)


def is_below(path: str, directory: str) -> bool:
    """Strictly below; both absolute and free of links."""
    return path != directory and path.startswith(directory.rstrip("/") + "/")


def is_within(path: str, directory: str) -> bool:
    return path == directory or is_below(path, directory)


def in_kernel_tree(mount: Mount) -> bool:
    return any(is_within(mount.path, tree) for tree in KERNEL_TREES)


def child_directories(directory: str) -> list[str]:
    """Real directories directly inside, links left out; empty where this user may not look."""
    try:
        with os.scandir(directory) as entries:
            return sorted(entry.path for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return []
