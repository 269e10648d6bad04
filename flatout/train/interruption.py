"""SIGTERM as a request: the step under way ends, what was learnt is saved, then the process leaves."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType


@dataclass
class Stop:
    """`requested` becomes True when the signal comes."""

    requested: bool = False


@contextlib.contextmanager
def stop_on_sigterm() -> Iterator[Stop]:
    """While it lasts, SIGTERM only sets a flag. In another thread than the main one nothing can be caught."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handler(number: int, frame: FrameType | None) -> None:
        stop.requested = True

    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)
