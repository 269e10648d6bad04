"""How far a rank is, written where its launcher reads it: the launcher sees a rank that hangs, and which one it is.

A small file for each rank, mapped into memory: a beat costs a microsecond and no system call. It says how many steps
were completed, whether the rank is inside one (ranks that wait for another are), and when that last changed. Only under
`flatout launch`, which names the file in a variable.

SIGUSR1 makes such a rank print where each of its threads is, unless the script uses that signal itself.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import signal
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from flatout import environment

_PID = struct.Struct("=q")
_LAYOUT = struct.Struct("=qqqdqq")
"""The process; steps completed since it started; the number of the last; when; inside one?; does SIGUSR1 dump?"""
FILE_BYTES = _LAYOUT.size
STDERR = 2


@dataclass(frozen=True, kw_only=True)
class Beat:
    """What a rank said last."""

    pid: int
    beats: int
    """Steps that it completed since it was started."""
    step: int
    """The number of the last one, as the training counts them: a resumed one goes on counting."""
    at_seconds: float
    """By the monotonic clock of its machine."""
    inside: bool
    """Is it inside a step, rather than between two?"""
    dumps: bool
    """Does SIGUSR1 print its stack?"""


class Heartbeat:
    """The file of one rank, as that rank sees it."""

    def __init__(self, path: Path) -> None:
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), FILE_BYTES)
        self._pid = os.getpid()
        self._beats, self._step, self._inside = 0, 0, False
        self._dumps = _prints_stack_on_signal()

    def write(self, step: int, *, inside: bool) -> None:
        if os.getpid() != self._pid:  # a child that was forked: its steps are not the rank's
            return
        self._beats += not inside
        self._step, self._inside = step, inside
        self.renew()

    def renew(self) -> None:
        if os.getpid() == self._pid:
            said = (self._pid, self._beats, self._step, time.monotonic(), int(self._inside), int(self._dumps))
            _LAYOUT.pack_into(self._memory, 0, *said)


def heartbeat() -> Heartbeat | None:
    """This process's, which TrainStep writes before and after each step; None without a launcher."""
    if not _made:
        path = environment.heartbeat_file()
        _made.append(_opened(path) if path is not None else None)
    return _made[0]


def alive() -> None:
    """Say that this rank does something else than train, such as evaluate: it does not hang. Does nothing without a
    launcher, or before the first step."""
    if _made and _made[0] is not None:
        _made[0].renew()


def read_beat(path: Path) -> Beat | None:
    """What the rank of this file said last; None: nothing yet."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    if len(content) < FILE_BYTES:
        return None
    pid, beats, step, at, inside, dumps = _LAYOUT.unpack_from(content)
    if not at:
        return None
    return Beat(pid=pid, beats=beats, step=step, at_seconds=at, inside=bool(inside), dumps=bool(dumps))


def make_file(path: Path) -> None:
    """An empty one, for a rank that is about to start."""
    path.write_bytes(bytes(FILE_BYTES))


def name_process(path: Path, pid: int) -> None:
    """This process is the rank, and beats; those that it starts inherit the variable, and do not."""
    with open(path, "r+b") as file:
        file.write(_PID.pack(pid))


_made: list[Heartbeat | None] = []
"""This process's, once it was asked for."""


def _opened(path: Path) -> Heartbeat | None:
    """None: this is no rank, but a process that one has started."""
    with contextlib.suppress(OSError, ValueError, struct.error):  # the launcher has ended, and its files with it
        if _PID.unpack_from(path.read_bytes())[0] == os.getpid():
            return Heartbeat(path)
    return None


def _prints_stack_on_signal() -> bool:
    """Let SIGUSR1 print the stack of each thread; False where the script has its own use for the signal."""
    wanted = getattr(signal, "SIGUSR1", None)
    if wanted is None or signal.getsignal(wanted) is not signal.SIG_DFL:
        return False
    try:
        faulthandler.register(wanted, file=STDERR, all_threads=True)
    except (OSError, RuntimeError, ValueError):  # no stderr
        return False
    return True
