"""SIGTERM and Ctrl-C as requests: the current step is finished, the run is saved, then the process ends.

Waiting for data may take forever, so it is interrupted; nothing else is, because a step, a user's evaluation or a save
could be left half done. A second Ctrl-C ends the run at once, as Python does.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn, TypeVar

from flatout.signals import told_of

T = TypeVar("T")


class BrokenOff(BaseException):
    """Raised in code that waits for data; not an Exception, so that a data set's own handlers let it through."""


class Stop:
    """Whether a signal asked to stop. `breaks_off`: it interrupts waiting, unless other ranks depend on this rank."""

    def __init__(self, *, breaks_off: bool = True) -> None:
        self.signal: signal.Signals | None = None
        self._breaks_off, self._waiting = breaks_off, False
        self._process = os.getpid()

    @property
    def requested(self) -> bool:
        return self.signal is not None

    def waiting(self, wait: Callable[[], T]) -> T:
        """`wait()`, in which a signal raises BrokenOff."""
        self._waiting = self._breaks_off
        try:
            if self._waiting and self.requested:
                raise BrokenOff
            return wait()
        finally:
            self._waiting = False

    def leave(self, step: int) -> NoReturn:
        """End as the signal requires: KeyboardInterrupt for Ctrl-C, SystemExit(143) for SIGTERM, as in shells."""
        if self.signal == signal.SIGINT:
            raise KeyboardInterrupt(f"stopped after {step} steps")
        raise SystemExit(128 + signal.SIGTERM)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            _as_ever(number)
            return
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = self.signal or signal.Signals(number)
        if self._waiting:
            self._waiting = False
            raise BrokenOff


@contextlib.contextmanager
def stop_on_signals(*, breaks_off: bool = True) -> Iterator[Stop]:
    """Within, SIGTERM and Ctrl-C only ask to stop."""
    stop = Stop(breaks_off=breaks_off)
    with told_of(stop._handle, signal.SIGTERM, signal.SIGINT):
        yield stop


def _as_ever(number: int) -> None:
    """What the signal does where nothing handles it. For processes that were forked meanwhile, as by a data loader or
    an evaluation: nobody there looks whether a stop was requested, and whoever ends them waits for that."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
