"""What is done when a process of the script's, or of one of its trials, ends."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import shlex
import sys
from collections.abc import Callable
from typing import Any, NoReturn  # Any: whatever the script gives

FIRST_AT_EXIT = 0
"""The priority of a finalizer of multiprocessing: a forked child runs those, and no exit handlers."""
exit_now = os._exit
"""As it was before a trial put its own in its place."""


def call_at_end(callback: Callable[[], object]) -> None:
    """However the process was started. May call it twice, and in forks of this process."""
    atexit.register(callback)
    util = sys.modules.get("multiprocessing.util")
    if util is not None:
        util.Finalize(None, callback, exitpriority=FIRST_AT_EXIT)


def call_before_exec(callback: Callable[[str], object]) -> None:
    """Call it with the command where this process, or a fork of it, is about to become another program, as by
    os.execvp: then nothing of ours is left in it. What the system would refuse, as a program that is not there, is not
    announced."""

    def announced(original: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
        @functools.wraps(original)
        def become(path: Any, words: Any, *environment: Any, **named: Any) -> NoReturn:  # whatever the script gives
            with contextlib.suppress(TypeError, ValueError, OSError):
                if os.path.isfile(path) and os.access(path, os.X_OK):
                    callback(_command(path, words))
            original(path, words, *environment, **named)

        return become

    os.execv, os.execve = announced(os.execv), announced(os.execve)  # all others end in one of these


def _command(path: Any, words: Any) -> str:
    return shlex.join([str(path) if isinstance(path, int) else os.fsdecode(path), *map(os.fsdecode, words[1:])])


def flush_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # the script may have closed or replaced it
            stream.flush()


def leave_at_once(status: int) -> NoReturn:
    """With what was printed, and without any exit handler of the script's."""
    flush_streams()
    exit_now(status)
