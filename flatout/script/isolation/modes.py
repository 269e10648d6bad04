"""How a trial is kept from the user's files, and why: `enter` chooses.

Put the scratch directory below /tmp or /var/tmp, on a disk, with a short path (a socket's path has at most 107
characters). Beneath a home directory it works too, but then that home is laid over child by child (see overlay.py).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

from flatout.errors import MachineError

from . import devices, kernel, processes
from .guard import enter_guard
from .namespaces import own_network
from .overlay import enter_overlay
from .scratch import prepare

Mode = Literal["overlay", "guard"]
Network = Literal["loopback", "machine"]


@dataclass(frozen=True, kw_only=True)
class Isolation:
    """How this process is kept from the user's files; `details` says what is special or still possible here."""

    mode: Mode
    reason: str
    details: tuple[str, ...] = ()
    processes: processes.Mode = "namespace"
    """What ends everything that was started: a PID namespace, or a process that looks for it (processes.py)."""
    network: Network = "loopback"
    """What can be reached: this trial alone, or whatever this machine can."""


def enter(
    scratch: Path,
    shared: Sequence[Path] = (),
    mode: Literal["auto", "overlay", "guard"] = "auto",
    on_first_write: Callable[[str], NoReturn] | None = None,
    *,
    allow_network: bool = False,
) -> Isolation:
    """From here on this process, and whatever it starts, changes nothing of the user's. There is no way back.

    Returns in a new process; the calling one waits outside for its end and leaves with its status. Call it while the
    process has one thread, before the script or torch is imported. What is written below `scratch` and the `shared`
    directories is real and stays. In guard mode `on_first_write` is called with a description before the first write
    anywhere else; it must not return. Without it that write raises PermissionError.

    Raises MachineError where the mode that was asked for, or a network of its own, is refused.
    """
    scratch = prepare(scratch)
    for path in shared:
        path.mkdir(parents=True, exist_ok=True)
    resolved = [path.resolve() for path in shared]
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    refusal = "asked for"
    overlaid: tuple[bool, tuple[str, ...]] | None = None
    if mode != "guard":
        try:
            overlaid = enter_overlay(scratch, resolved)
        except MachineError as error:
            if mode == "overlay":
                raise
            refusal = str(error)
    if not allow_network:
        own_network()
    network: Network = "machine" if allow_network else "loopback"
    if overlaid is not None:
        return _finish_overlay(*overlaid, network)
    ended_by = processes.split("reaper", lambda mode: None, _renounce)
    guarded = enter_guard(scratch, resolved, on_first_write)
    return Isolation(mode="guard", reason=refusal, details=guarded, processes=ended_by, network=network)


def _finish_overlay(as_user: bool, details: Sequence[str], network: Network) -> Isolation:
    """The processes, once the files and the network are out of reach."""
    caller, notes = os.getpid(), list(details)

    def lay_proc(granted: processes.Mode) -> None:
        if granted == "namespace":
            try:
                devices.lay_own_proc(caller)
                return
            except OSError as error:
                notes.append(f"/proc shows processes under other numbers than their own ({error})")
        devices.make_settings_read_only()

    has_proc = not as_user or devices.proc_is_whole()
    ended_by = processes.split("namespace" if has_proc else "reaper", lay_proc, _renounce)
    if ended_by == "reaper":
        notes.append("no PID namespace here: other processes of this user can be signalled")
    reason = "a private mount namespace, made " + ("in a user namespace" if as_user else "as root")
    return Isolation(mode="overlay", reason=reason, details=tuple(notes), processes=ended_by, network=network)


def _renounce() -> None:
    """An ordinary user has no capability, except those that a user namespace gave; root keeps the harmless ones."""
    kernel.drop_capabilities(None if os.getuid() else kernel.ESCAPING_CAPABILITIES)
