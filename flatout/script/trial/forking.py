"""Fork a script at its first step, so that several trials pay for one start: the side of the process that is forked.

    point = ForkPoint(child, commands, descriptor)
    point.obstacle()                 # why this process must not be forked as it is; "" if it may
    read = point.fork()              # in the new process: what reads its commands; None in the one that was forked

Started this way, a trial has everything as the script had it at its first step: weights, generators, open files at
their positions. What a fork would lose or share is an obstacle: threads (those of OpenMP end first, and start again
with the next parallel loop), child processes, a GPU, sockets and pipes, memory that is shared to be written.

All forks see one copy-on-write layer of the files, so `wrote` says whether one of them has written: what another would
find there is then not what the script left.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import re
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from flatout.machine.detect import available_memory_bytes
from flatout.machine.process_memory import resident_bytes
from flatout.replaced import replaced
from flatout.script.isolation import kernel, note_writes, redirect_temporary_files
from flatout.script.process_end import flush_streams
from flatout.script.trial.forked import POLL_SECONDS, STREAMS, count_threads, take_streams
from flatout.units import format_bytes

if TYPE_CHECKING:
    from flatout.script.trial.isolated_child import IsolatedChild

DESCRIPTORS = STREAMS + 2
"""Of a new trial: its streams, then those for commands and answers."""
OPENMP = re.compile(r"/\S*/lib(?:g|i)?omp5?[^/\s]*\.so\S*")
PAUSE_HARD = 2
"""omp_pause_hard of OpenMP 5.0: its threads end."""
ENDING_SECONDS = 1.0
"""Threads that were told to end are listed until the kernel has removed them, which on a busy machine takes a while."""
SEMAPHORE = re.compile(r"/sem\.\S+")
"""A lock of multiprocessing, such as tqdm's: meant to be shared, and not held between two steps."""


class ForkPoint:
    """Of one process. commands: the descriptor it reads; forks: of the socket that brings descriptors for new trials;
    None: it is never forked, but may be asked whether it could be."""

    def __init__(self, child: IsolatedChild, commands: int, forks: int | None) -> None:
        self._child, self._commands = child, commands
        self._socket = None if forks is None else socket.socket(fileno=forks)
        if self._socket is not None:
            self._socket.set_inheritable(False)
        self._held = contextlib.ExitStack()
        self._pool_threads = 0
        self.wrote = ""
        """The first write of a process that was forked; '' while there was none, or it is not watched."""

    def obstacle(self) -> str:
        own = {self._commands, self._child.answers_descriptor}
        if self._socket is not None:
            own.add(self._socket.fileno())
        return (
            _no_exit_codes()
            or _children()
            or _gpu()
            or _memory()
            or _shared_memory()
            or _descriptors(own)
            or self._threads()
        )

    def fork(self) -> Callable[[], str] | None:
        assert self._socket is not None
        _, given, _, _ = socket.recv_fds(self._socket, 1, DESCRIPTORS)
        _end_openmp_threads()
        flush_streams()
        forked, state = os.getpid(), random.getstate()
        pid = os.fork()
        if not pid:
            read = self._become(forked, given)
            random.setstate(state)  # Python has seeded it anew
            return read
        for number in given:
            os.close(number)
        self._child.write({"event": "forked", "pid": pid})
        return None

    def poll(self, pid: int) -> int | None:
        """The exit code of a fork; None while it runs."""
        ended, status = os.waitpid(pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if ended else None

    def kill(self, pid: int) -> None:
        """End a fork that was not polled as ended, and what it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):  # it had no group yet
            os.kill(pid, signal.SIGKILL)

    def _become(self, forked: int, given: list[int]) -> Callable[[], str]:
        """This is the new process."""
        kernel.die_with_parent(signal.SIGKILL)
        if os.getppid() != forked:
            os._exit(1)
        os.setpgid(0, 0)
        assert self._socket is not None
        self._socket.close()
        self._socket = None
        commands, answers = take_streams(given)
        os.close(self._commands)
        self._commands = commands
        self._child.become(answers)
        for number in _regular_files({commands, answers}):
            _reopen(number)
        sys.dont_write_bytecode = True
        redirect_temporary_files(str(self._child.own_folder()))
        note_writes(self._child.writable, self._note)
        return os.fdopen(commands, "r").readline

    def follow_threads(self, torch: ModuleType) -> None:
        """Call it when torch has been imported. Its first `set_num_threads` starts a pool of threads besides those of
        OpenMP, which a forked process makes anew where it needs it."""
        self._held.enter_context(replaced(torch, "set_num_threads", self._noting_threads))

    def _noting_threads(self, original: Callable[[int], None]) -> Callable[[int], None]:
        def set_num_threads(count: int) -> None:
            before = count_threads()
            original(count)
            self._pool_threads += max(0, count_threads() - before)

        return set_num_threads

    def _threads(self) -> str:
        """Those of OpenMP end when asked, and those of numpy's BLAS whenever a process is forked."""
        _end_progress_monitor()
        names = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
        if names:
            return f"it has threads: {', '.join(names)}"
        _end_openmp_threads()
        pid = os.fork()
        if not pid:
            os._exit(0)
        os.waitpid(pid, 0)
        until = time.monotonic() + ENDING_SECONDS
        while count_threads() > 1 + self._pool_threads and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
        known = count_threads() == 1 + self._pool_threads
        return "" if known else "it has threads that Python does not know"

    def _note(self, write: str) -> None:
        if not _is_of_levers():
            self.wrote = self.wrote or write


def _is_of_levers() -> bool:
    """Is it a lever that writes, or a compiler: what compiled kernels are kept in, and does not change a step?"""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        name = str(frame.f_globals.get("__name__"))
        if name.startswith(("flatout.kernels.", "flatout.levers.", "torch._inductor.")):
            return True
        if name.partition(".")[0] not in {"flatout", *sys.stdlib_module_names}:  # what the others do is asked of them
            return False
    return False


def _no_exit_codes() -> str:
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        return "it ignores SIGCHLD, so that nothing learns how a fork ends"
    return ""


def _children() -> str:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return ""
    return "it has started other processes, such as the workers of a loader"


def _gpu() -> str:
    return "backward passes have a thread for each GPU" if sys.modules["torch"].cuda.device_count() else ""


def _memory() -> str:
    """It stays beside two others, which in time write to all that they have got from it."""
    needed, free = 2 * resident_bytes(), available_memory_bytes()
    return f"two more would take {format_bytes(needed)}, and {format_bytes(free)} are free" if needed > free else ""


def _shared_memory() -> str:
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        found = line.split(maxsplit=5)
        name = found[5] if len(found) > 5 else "memory without a name"
        if found[1].startswith("rw") and found[1].endswith("s") and not SEMAPHORE.search(name):
            return f"it has shared memory: {name}"
    return ""


def _descriptors(own: Collection[int]) -> str:
    for number, mode in _open_descriptors(own):
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISCHR(mode)):
            return f"it holds open {_name_of(number)}"
    for number in _regular_files(own):
        try:
            os.close(os.open(f"/proc/self/fd/{number}", _flags(number)))
        except OSError as error:
            return f"{_name_of(number)} cannot be opened again ({error.strerror})"
    return ""


def _name_of(number: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        return f"descriptor {number}"


def _open_descriptors(own: Collection[int]) -> Iterator[tuple[int, int]]:
    """(number, mode), but for the streams and those of a trial."""
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        if number >= STREAMS and number not in own:
            with contextlib.suppress(OSError):  # that of the listing itself is closed again
                yield number, os.fstat(number).st_mode


def _regular_files(own: Collection[int]) -> list[int]:
    return [number for number, mode in _open_descriptors(own) if stat.S_ISREG(mode)]


def _flags(number: int) -> int:
    import fcntl  # Windows lacks it, and must be able to import this file

    return fcntl.fcntl(number, fcntl.F_GETFL) & ~(os.O_CREAT | os.O_EXCL | os.O_TRUNC)


def _reopen(number: int) -> None:
    """A position in the file that is this process's own: forks share one."""
    position = os.lseek(number, 0, os.SEEK_CUR)
    opened = os.open(f"/proc/self/fd/{number}", _flags(number))
    os.lseek(opened, position, os.SEEK_SET)
    os.dup2(opened, number, os.get_inheritable(number))
    os.close(opened)


def _end_openmp_threads() -> None:
    for path in sorted(set(OPENMP.findall(Path("/proc/self/maps").read_text(errors="replace")))):
        pause = getattr(ctypes.CDLL(path), "omp_pause_resource_all", None)
        if pause is not None:  # since OpenMP 5.0
            pause(PAUSE_HARD)


def _end_progress_monitor() -> None:
    """The thread that redraws tqdm's bars; the next bar starts another."""
    module = sys.modules.get("tqdm._monitor")
    monitors = [] if module is None else [one for one in threading.enumerate() if isinstance(one, module.TMonitor)]
    for monitor in monitors:
        monitor.exit()
        monitor.tqdm_cls.monitor = None
