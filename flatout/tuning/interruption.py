"""Ctrl-C while a plan is sought: the search ends, what it has kept is proved and becomes the plan. A second one ends
all of it, and so does the first where nothing has been kept yet."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

STOPPING = "stopping the search; what was found so far is proved (Ctrl-C again: end without a plan)"


@contextlib.contextmanager
def stopped_by_interrupt(stop: Callable[[], bool], progress: Callable[[str], None]) -> Iterator[None]:
    """Within, the first Ctrl-C calls `stop`, which returns whether there is anything to go on with.

    Outside of the main thread, and where Ctrl-C has a handler of the program's own or is ignored, nothing is changed.
    """
    mine = threading.current_thread() is threading.main_thread()
    if not mine or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if not stop():
            raise KeyboardInterrupt
        with contextlib.suppress(RuntimeError):  # it came in the middle of another line
            progress(STOPPING)

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
