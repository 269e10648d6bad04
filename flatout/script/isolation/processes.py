"""Everything that a trial starts ends with it, detached processes too.

Two ways, the better one first. In both the process that calls `split` stays outside and waits, and the script runs in
a new one:

    namespace   caller -> init -> script: in a PID namespace the kernel kills every process when its init ends. The
                script sees and can signal only its own processes. Init reaps all of them before it ends: otherwise
                the kernel drops their CPU time, and a load measurement attributes it to other users.
    reaper      caller -> script: orphans become the caller's children, which it kills when the script ends

The caller leaves as the script does, with its exit code or of the same signal. SIGTERM to the caller ends all of them
at once; so does the death of whoever started the caller.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Literal, NoReturn

import psutil

from flatout.descendants import descendants

from . import kernel

Mode = Literal["namespace", "reaper"]

_ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))  # Windows: one


def split(mode: Mode, prepare: Callable[[Mode], None], renounce: Callable[[], None]) -> Mode:
    """Returns in the script's process only, with the mode that the kernel granted.

    `prepare` runs with rights still held, in the namespace's init if there is one; `renounce` gives those up, in every
    process. The caller must have one thread, and must have flushed what it wrote.
    """
    caller = os.getpid()
    if mode == "namespace":
        try:
            kernel.unshare(kernel.CLONE_NEWPID)
        except OSError:
            mode = "reaper"
    if mode == "reaper":
        kernel.adopt_orphans()
    told, tell = os.pipe()
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    child = os.fork()
    if child:
        os.close(tell)
        _stand_by(mode, child, told, renounce)
    if mode == "namespace":
        for number in _ENDING:  # before one is let through: the default action does nothing to an init
            signal.signal(number, lambda *_: _end_namespace(tell, signal.SIGKILL))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
    os.close(told)
    prepare(mode)
    renounce()
    if mode == "namespace":
        _start_below_init(tell)
    else:
        os.close(tell)
    os.setsid()  # a group of its own: the caller's has no number inside the namespace
    kernel.die_with_parent(signal.SIGKILL)
    if mode == "reaper" and os.getppid() != caller:
        os._exit(1)
    return mode


def _stand_by(mode: Mode, child: int, told: int, renounce: Callable[[], None]) -> NoReturn:
    """The caller's part: end the others when told so, else leave as the script did."""

    def end_child(*_: object) -> None:
        with suppress(ProcessLookupError):  # it has just been waited for
            os.kill(child, signal.SIGTERM if mode == "namespace" else signal.SIGKILL)

    for number in _ENDING:
        signal.signal(number, end_child)
    renounce()
    kernel.die_with_parent(signal.SIGKILL if mode == "namespace" else signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
    _, status = os.waitpid(child, 0)
    for number in _ENDING:
        signal.signal(number, signal.SIG_IGN)
    if mode == "namespace":  # the kernel has killed the others; /proc shows no number that would be valid here
        answer = os.read(told, 32)
        status = int(answer) if answer else status
    else:
        _end_descendants()
    _leave_as(status)


def _start_below_init(tell: int) -> None:
    """Become init, and return in a child of it, which will be the script."""
    kernel.die_with_parent(signal.SIGKILL)
    if _reader_is_gone(tell):
        os._exit(1)  # the caller died before the line above
    script = os.fork()
    if not script:
        for number in _ENDING:
            signal.signal(number, signal.SIG_DFL)
        os.close(tell)
        return
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == script:
            _end_namespace(tell, status)


def _end_namespace(tell: int, status: int) -> NoReturn:
    """Init's own end, after that of all others. `status`: the script's, as `waitpid` gives it."""
    if os.getpid() != 1:  # the next line would end everything that the user has
        os._exit(1)
    with suppress(ProcessLookupError):  # there is no other process
        os.kill(-1, signal.SIGKILL)
    with suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)
    with suppress(BrokenPipeError):  # the caller has been killed
        os.write(tell, str(status).encode())
    os._exit(0)


def _reader_is_gone(pipe: int) -> bool:
    import select

    poll = select.poll()
    poll.register(pipe, 0)  # errors are always told
    return bool(poll.poll(0))


def _end_descendants() -> None:
    """Kill what descends from this process, until there is nothing left to wait for."""
    while True:
        for descendant in descendants():
            with suppress(psutil.Error):  # it has ended meanwhile, or is another user's
                descendant.kill()
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _leave_as(status: int) -> NoReturn:
    if os.WIFSIGNALED(status):
        import resource

        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the script has left a core already, where one is wanted
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
