"""SIGTERM and Ctrl-C as requests: the step under way ends, what was learnt is saved, then the process leaves.

Waiting for data may take for ever, so it is broken off; nothing else is, because nobody knows what a step, a user's
evaluation or a save would leave half done. A second Ctrl-C ends the run at once, as Python does.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn


class BrokenOff(BaseException):
    """Raised in whoever waits for data; not an Exception, so that a data set's own handlers let it through."""


class Stop:
    """Whether a signal asked to stop. `breaks_off`: not where other ranks would wait for this one's step."""

    def __init__(self, *, breaks_off: bool = True) -> None:
        self.signal: signal.Signals | None = None
        self._breaks_off, self._waiting = breaks_off, False

    @property
    def requested(self) -> bool:
        return self.signal is not None

    def waiting(self, wait: Callable[[], Any]) -> Any:
        """`wait()`, which a signal ends by BrokenOff."""
        self._waiting = self._breaks_off
        try:
            if self._waiting and self.requested:
                raise BrokenOff
            return wait()
        finally:
            self._waiting = False

    def leave(self, step: int) -> NoReturn:
        """End as the signal wants it: KeyboardInterrupt for Ctrl-C, SystemExit(143) for SIGTERM, as a shell says."""
        if self.signal == signal.SIGINT:
            raise KeyboardInterrupt(f"stopped after {step} steps")
        raise SystemExit(128 + signal.SIGTERM)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = self.signal or signal.Signals(number)
        if self._waiting:
            self._waiting = False
            raise BrokenOff


@contextlib.contextmanager
def stop_on_signals(*, breaks_off: bool = True) -> Iterator[Stop]:
    """While it lasts, SIGTERM and Ctrl-C only ask to stop. Outside of the main thread nothing can be caught.

    Ctrl-C is left alone where it has a handler of the program's own, or is ignored (a job in the background).
    """
    stop = Stop(breaks_off=breaks_off)
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        numbers.append(signal.SIGINT)
    before = {number: signal.signal(number, stop._handle) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
