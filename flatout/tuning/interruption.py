"""Ctrl-C while a plan is sought: the search ends, what it has kept is proved and becomes the plan. A second one ends
all of it, and so does the first where nothing has been kept yet."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

from flatout.signals import told_of

STOPPING = "stopping the search; what was found so far is proved (Ctrl-C again: end without a plan)"


@contextlib.contextmanager
def stopped_by_interrupt(stop: Callable[[], bool], progress: Callable[[str], None]) -> Iterator[None]:
    """Within, the first Ctrl-C calls `stop`, which returns whether there is anything to go on with."""

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if not stop():
            raise KeyboardInterrupt
        with contextlib.suppress(RuntimeError):  # it came in the middle of another line
            progress(STOPPING)

    with told_of(handle, signal.SIGINT):
        yield
