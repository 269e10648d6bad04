"""What is done when a process of the script's, or of one of its trials, ends."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Callable
from typing import NoReturn

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


def flush_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # the script may have closed or replaced it
            stream.flush()


def leave_at_once(status: int) -> NoReturn:
    """With what was printed, and without any exit handler of the script's."""
    flush_streams()
    exit_now(status)
