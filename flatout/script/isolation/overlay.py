"""Copy-on-write over the whole machine, for one process: a new root in a private mount namespace.

    1. unshare     a mount namespace of our own; an ordinary user gets it together with a user namespace
    2. build       scratch/root becomes the new root: each file system again at its own path, as a copy-on-write
                   layer, or read-only where the kernel refuses one; /dev, /sys and /proc as devices.py says
    3. verify      no mount of the new root may be writable that is neither a layer nor meant to be real
    4. pivot       the new root replaces the old one, which no path can reach any more
    5. give up     the capabilities with which a root script could undo this

Everything fails closed: what is not understood stays read-only, so that a script gets an OSError, not a user's file.
Sockets and named pipes lead to other programs even through a read-only mount. A layer cuts them off (a connection is
refused); where there is none, an empty file hides them.

A directory that holds the scratch cannot have its upper directory there, so its layer lies in memory; its child
directories then get layers of their own on disk, and so on down to the scratch. In a user namespace the kernel also
refuses a layer over a directory that holds a mount point: there only the children get layers, and the directory itself
(usually /, /home or /mnt, which an ordinary user cannot write anyway) is read-only.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from flatout.errors import MachineError

from . import devices, kernel, mounts, namespaces, owners
from .layers import SOURCE, Layers
from .mounts import Mount, is_below, is_within
from .scratch import LAYERS, ROOT

CHILDREN_LIMIT = 256  # layers for the children of one directory; each is a mount, and mounts are not free


def enter_overlay(scratch: Path, shared: Sequence[Path]) -> tuple[bool, tuple[str, ...]]:
    """Steps 1 to 4. Returns whether a user namespace was needed, and the details.

    Raises MachineError, with the real root still in place, where it fails. The capabilities are the caller's to drop.
    """
    working_directory = os.getcwd()
    places = owners.places(working_directory)
    try:
        as_user = namespaces.own_mounts()
        tree = _Tree(scratch, shared, places if as_user else {}, as_user=as_user)
        tree.build()
        tree.verify(working_directory)
        kernel.pivot_root(tree.root)
    except OSError as error:
        raise MachineError(f"the kernel refuses a copy-on-write view of the files ({error})") from error
    finally:
        os.chdir(working_directory)  # by path: the old working directory is the real one
    details = [*tree.notes, *_limits(as_user=as_user), *_inherited_descriptors(scratch)]
    return as_user, tuple(details)


class _Tree:
    """The new root under construction."""

    def __init__(self, scratch: Path, shared: Sequence[Path], places: Mapping[str, bool], *, as_user: bool) -> None:
        self.scratch = str(scratch)
        self.root = str(scratch / ROOT)
        self.shared = [str(path) for path in shared if not is_within(str(path), self.scratch)]
        self.places = places
        self.as_user = as_user
        self.layered: set[str] = set()
        self.notes: list[str] = []
        self.in_memory: list[str] = []
        self.meant: set[str] = set()
        """Paths that may be written and are no layer: devices, /proc."""
        self.mounts = list(mounts.visible(mounts.read()))
        self.layers = Layers(scratch, as_user=as_user)

    def build(self) -> None:
        for mount in self.mounts:
            if not mounts.in_kernel_tree(mount):
                self._lay(mount)
        self.meant.update(devices.lay_dev(self.root, self.layers))
        devices.lay_sys_and_proc(self.root)
        self.meant.add("/proc")
        for path in self.places:
            self._lay_place(path)
        for path in (self.scratch, *self.shared):
            kernel.bind(path, self._inside(path), recursive=path != self.scratch)
        # Hide the layers' own directories, in which every changed file appears again.
        hidden = str(Path(self.scratch, LAYERS))
        kernel.mount(SOURCE, self._inside(hidden), "tmpfs", kernel.MS_RDONLY, "size=4k,mode=0500")
        if self.in_memory:
            self.notes.append(self._memory_note())

    def _memory_note(self) -> str:
        bound = f"at most {self.layers.memory_bytes} bytes in all"
        if self.layers.disk_refusal:
            return f"all changes are held in memory, {bound}: {self.scratch} cannot ({self.layers.disk_refusal})"
        places = ", ".join(self.in_memory[:4]) + (" ..." if len(self.in_memory) > 4 else "")
        return f"new files directly in {places} are held in memory, {bound}"

    def _inside(self, path: str) -> str:
        return self.root if path == "/" else self.root + path

    def _lay(self, mount: Mount) -> None:
        """One file system again at its own path: layered, or read-only with layers on the directories in it."""
        if not os.path.exists(mount.path):
            return  # in a directory that this user may not enter: neither can the script
        layered = mount.writable and self._layer(mount, mount.path)
        if not layered:
            kernel.bind(mount.path, self._inside(mount.path), recursive=True)
            kernel.make_read_only(self._inside(mount.path), mount.flags)
            self._hide_ways_out(mount.path)
        if mount.writable and os.path.isdir(mount.path):
            if not layered:
                self.notes.append(f"read-only: files directly in {mount.path} ({mount.filesystem})")
            if mount.path in self.in_memory or (not layered and self._is_on_way(mount.path)):
                self._lay_children(mount, mount.path, covered=layered)

    def _hide_ways_out(self, path: str) -> None:
        """Sockets, named pipes and disks at a path that is only read-only, or directly in it."""
        entries = [path]
        if os.path.isdir(path):
            try:
                entries = [entry.path for entry in os.scandir(path) if not entry.is_dir(follow_symlinks=False)]
            except OSError:
                return  # it may not be looked into: what is there cannot be found by the script either
        for entry in entries:
            try:
                mode = os.lstat(entry).st_mode
            except FileNotFoundError:
                continue  # it has just gone
            leads_out = stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode) or stat.S_ISBLK(mode) or stat.S_ISCHR(mode)
            if leads_out and os.access(entry, os.W_OK):
                kernel.bind(str(self.layers.nothing), self._inside(entry))
                kernel.make_read_only(self._inside(entry), kernel.MS_NOSUID | kernel.MS_NODEV)

    def _lay_place(self, path: str) -> bool:
        """A layer on top of a layer, where owners.py asks for one; returns whether there is one now."""
        foreign = self.places.get(path)
        nested = foreign is not None and (foreign or os.path.dirname(path) not in self.layered)
        done = path in self.layered or any(is_below(layered, path) for layered in self.layered)
        if not nested or done or not self._is_ours_to_lay(path):
            return False
        holder = max((m for m in self.mounts if is_within(path, m.path)), key=lambda mount: len(mount.path))
        return holder.writable and not mounts.in_kernel_tree(holder) and self._layer(holder, path)

    def _layer(self, mount: Mount, directory: str) -> bool:
        """Returns whether the directory got a layer; it gets none where it holds a mount that cannot be moved."""
        if not os.path.isdir(directory) or (self.as_user and self._holds_mount(directory)):
            return False
        bases = [self.layers.memory]
        if not self._holds_scratch(directory) and not self.layers.disk_refusal:
            bases.insert(0, self.layers.disk)
        for base in bases:
            with suppress(OSError):  # e.g. the same disk mounted a second time, scratch included: memory is possible
                self.layers.mount(directory, self._inside(directory), mount.flags, base)
                self.layered.add(directory)
                if base == self.layers.memory:
                    self.in_memory.append(directory)
                return True
        return False

    def _lay_children(self, mount: Mount, directory: str, *, covered: bool) -> None:
        """Layers on disk for what a memory layer covers only for want of better, or on what is read-only so far."""
        if covered and self.layers.disk_refusal:
            return
        children = [child for child in mounts.child_directories(directory) if self._is_ours_to_lay(child)]
        if covered:  # each layer costs some directories in the scratch: none for what memory is good enough for
            children = [child for child in children if child not in mounts.SYSTEM_TREES and _has_entries(child)]
        if len(children) > CHILDREN_LIMIT:
            fate = "held in memory" if covered else "read-only"
            self.notes.append(f"{fate}: {len(children) - CHILDREN_LIMIT} of {len(children)} folders in {directory}")
        for child in children[:CHILDREN_LIMIT]:
            if covered and self._is_on_way(child):
                self._lay_place(child)
                self._lay_children(mount, child, covered=True)
            elif not self._layer(mount, child):
                if not covered:
                    self._hide_ways_out(child)
                if self._is_on_way(child):  # elsewhere the file system takes no layer, so neither will its children
                    self._lay_children(mount, child, covered=covered)
            elif self._holds_scratch(child):
                self._lay_children(mount, child, covered=True)

    def _is_on_way(self, directory: str) -> bool:
        """Its layer is refused, or lies in memory, for a reason that need not hold for its children."""
        return self._holds_scratch(directory) or (self.as_user and self._holds_mount(directory))

    def _is_ours_to_lay(self, directory: str) -> bool:
        is_mount = any(other.path == directory for other in self.mounts)
        excluded = directory in mounts.KERNEL_TREES or directory == self.scratch
        return not is_mount and not excluded and os.access(directory, os.X_OK)

    def _holds_scratch(self, directory: str) -> bool:
        return is_within(self.scratch, directory)

    def _holds_mount(self, directory: str) -> bool:
        return any(is_below(mount.path, directory) for mount in self.mounts)

    def verify(self, working_directory: str) -> None:
        """The promise itself: what a path can reach is a layer, read-only, the kernel's own, or meant to be real."""
        below_root = mounts.visible(mounts.read(), self.root)
        ours = [replace(mount, path=mount.path.removeprefix(self.root) or "/") for mount in below_root]
        for mount in ours:
            meant = mount.source == SOURCE or mount.path in self.meant
            meant = meant or any(is_within(mount.path, path) for path in (self.scratch, *self.shared))
            if mount.writable and not meant and os.path.exists(mount.path):
                raise MachineError(f"{mount.path} ({mount.filesystem}) would stay writable")
        around = [mount for mount in ours if is_within(working_directory, mount.path)]
        holder = max(around, key=lambda mount: len(mount.path))
        if not holder.writable and os.access(working_directory, os.W_OK):
            raise MachineError(f"the kernel refuses a copy-on-write layer over {working_directory}")


def _has_entries(directory: str) -> bool:
    try:
        with os.scandir(directory) as entries:
            return next(entries, None) is not None
    except OSError:
        return False


def _limits(*, as_user: bool) -> list[str]:
    free_sync = "fsync costs nothing here, moving a file to another top-level directory is not one step (EXDEV)"
    if not as_user:
        return [free_sync]
    groups = " or of another of this user's groups" if len(os.getgroups()) > 1 else ""
    return [
        free_sync,
        f"files that belong to another user{groups} can be read and replaced, but not changed in place (EOVERFLOW)",
        "a directory that existed before cannot be renamed in one step (EXDEV)",
    ]


def _inherited_descriptors(scratch: Path) -> list[str]:
    """A descriptor opened before we came here leads past every mount. Say which; closing them is the parent's matter.

    The standard streams are left out: they are meant to lead outside.
    """
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
            flags = int(Path("/proc/self/fdinfo", name).read_text().split("flags:")[1].split()[0], 8)
        except OSError:
            continue  # the one that listdir itself had open
        harmless = any(is_within(target, tree) for tree in (*mounts.KERNEL_TREES, str(scratch)))
        leads_to_writes = flags & os.O_ACCMODE or flags & os.O_DIRECTORY
        if int(name) > 2 and target.startswith("/") and leads_to_writes and not harmless:
            found.append(f"descriptor {name} was open before and still leads to the real {target}")
    return found
