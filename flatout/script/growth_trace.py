"""Which line makes a container grow: for a step or two, sizes are checked at every line of the script.

The source only shows where a name is appended to; it cannot distinguish two such places, or an append through another
name. Tracing slows Python down, so it comes last, when nothing is measured any more.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import TraceFunction


class GrowthTrace:
    """`sizes` return the size of each watched container; after `stop`, `line_of(index)` is where it grew most often."""

    def __init__(self, sizes: Sequence[Callable[[], int]], is_users_file: Callable[[str], bool]) -> None:
        self._sizes, self._is_users = list(sizes), is_users_file
        self._last = [size() for size in self._sizes]
        self._grew_at: list[Counter[tuple[str, int]]] = [Counter() for _ in self._sizes]
        self._current: tuple[str, int] | None = None
        self._on = False

    def start(self, frame: FrameType | None) -> None:
        """Trace from here on, running frames included. A script that is already traced keeps its own tracer."""
        if sys.gettrace() is not None:
            return
        self._on = True
        self._current = self._place(frame)
        sys.settrace(self._called)
        while frame is not None:
            if self._is_users(frame.f_code.co_filename):
                frame.f_trace = self._event
            frame = frame.f_back

    def stop(self) -> None:
        if self._on:
            self._look()
            sys.settrace(None)
            self._on = False

    def line_of(self, index: int) -> tuple[str, int] | None:
        """(file, line), or None if it did not grow."""
        most = self._grew_at[index].most_common(1)
        return most[0][0] if most else None

    def _place(self, frame: FrameType | None) -> tuple[str, int] | None:
        while frame is not None and not self._is_users(frame.f_code.co_filename):
            frame = frame.f_back
        return (frame.f_code.co_filename, frame.f_lineno) if frame is not None else None

    def _look(self) -> None:
        for index, size in enumerate(self._sizes):
            now = size()
            if now > self._last[index] and self._current is not None:
                self._grew_at[index][self._current] += 1
            self._last[index] = now

    def _called(self, frame: FrameType, event: str, argument: object) -> TraceFunction | None:
        if not self._is_users(frame.f_code.co_filename):
            return None
        self._look()
        self._current = self._place(frame)
        return self._event

    def _event(self, frame: FrameType, event: str, argument: object) -> TraceFunction:
        self._look()
        self._current = self._place(frame.f_back if event == "return" else frame)
        return self._event
