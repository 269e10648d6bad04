"""What is done when a process that the script has started ends, however it was started."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable

FIRST_AT_EXIT = 0
"""The priority of a finalizer of multiprocessing: a forked child runs those, and no exit handlers."""


def call_at_end(callback: Callable[[], object]) -> None:
    """May call it twice, and in forks of this process."""
    atexit.register(callback)
    util = sys.modules.get("multiprocessing.util")
    if util is not None:
        util.Finalize(None, callback, exitpriority=FIRST_AT_EXIT)
