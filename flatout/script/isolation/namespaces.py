"""Leave the namespaces that this process shares with the rest of the machine.

    mount     paths lead to what we mount; nothing that is mounted later reaches the machine
    ipc       System V shared memory and semaphores, POSIX message queues
    user      only for an ordinary user: in it they may make the others
    network   a loopback interface, and nothing beyond it
    pid       for the children of this process: see processes.py

A namespace can only be left while the process has one thread, and there is no way back.
"""

from __future__ import annotations

import os
from pathlib import Path

from flatout.errors import MachineError

from . import kernel

_REMEDY = "allow it: sysctl kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0"


def own_mounts() -> bool:
    """Leave the parent's mount and IPC namespaces; returns whether a user namespace was needed."""
    as_user = _unshare_as_root_or_user(kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC)
    try:
        kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    except OSError as error:
        raise MachineError(f"mounting is refused in a private namespace ({error})", remedy=_REMEDY) from error
    return as_user


def own_network() -> None:
    """A network of this process and its children, which has the loopback interface alone."""
    try:
        try:
            kernel.unshare(kernel.CLONE_NEWNET)
        except PermissionError:
            _unshare_as_root_or_user(kernel.CLONE_NEWNET)
        kernel.bring_loopback_up()
    except (OSError, MachineError) as error:
        raise MachineError(
            f"the kernel refuses a network namespace for a trial ({error})",
            limit="a trial must not send anything to other machines",
            remedy="pass --allow-network on the command line if this script may use the network in every trial",
        ) from error


def _unshare_as_root_or_user(flags: int) -> bool:
    threads = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 0
    if threads > 1:
        raise MachineError(f"this process has {threads} threads", limit="namespaces can only be changed with one")
    try:
        kernel.unshare(flags)
        return False
    except OSError:
        _own_user_namespace(flags)
        return True


def _own_user_namespace(others: int) -> None:
    user, group = os.getuid(), os.getgid()
    try:
        kernel.allow_own_proc_files()
        kernel.unshare(kernel.CLONE_NEWUSER | others)
        # The group map of an ordinary user is only accepted once the groups cannot be changed any more.
        for name, line in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            Path("/proc/self", name).write_text(line)
    except OSError as error:
        raise MachineError(f"no user namespace for this user ({error})", remedy=_REMEDY) from error
