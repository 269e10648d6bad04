"""Ctrl-C during a search: it ends with what it has."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

from flatout.signals import told_of

STOPPING = "stopping the search; what was found so far is checked (Ctrl-C again: end without a plan)"


@contextlib.contextmanager
def stopped_by_interrupt(stop: Callable[[], bool], progress: Callable[[str], None]) -> Iterator[None]:
    """Within, the first Ctrl-C calls `stop`, which returns whether anything was kept: then the search alone ends.

    A second one ends everything, and so does the first where nothing was kept.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if not stop():
            raise KeyboardInterrupt
        with contextlib.suppress(RuntimeError):  # it came in the middle of another line
            progress(STOPPING)

    with told_of(handle, signal.SIGINT):
        yield
