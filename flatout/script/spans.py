"""Where the time of a watched step went: nested timed calls of a few kinds.

A GPU runs asynchronously: the host time of a call is the time to queue its work, or to wait for everything queued
before. So each call records marks (events) in the GPU's queue, and its time is the GPU time between them, busy or idle.
They are read when the window is closed, so that no step waits for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from flatout.machine.device import Device, Mark

Reading = float | Mark | None
"""Of the host's clock, or a mark of the device; None: none could be made."""
KINDS = ("data", "transfer", "forward", "backward", "optimizer", "communication", "sync", "evaluation", "other")


@dataclass
class StepRow:
    """One watched step: its length and where it went, in seconds."""

    seconds: float
    parts: dict[str, float] = field(default_factory=dict)
    backwards: int = 1
    page_faults: int | None = None
    """Minor ones, of all threads; None: not counted."""
    step: int | None = None
    """Its number since watching began, the same on all ranks of a script."""


@dataclass
class Span:
    """One timed call and the calls inside it; `kind` may change until it is read."""

    kind: str
    begin: Reading
    end: Reading = None
    inner: list[Span] = field(default_factory=list)


class Timeline:
    """Makes marks: readings of the host's clock or, where a device is given, its events.

    While the script captures a CUDA graph nothing runs: marks are None then, and the time between them is 0.
    """

    def __init__(self, device: Device | None = None) -> None:
        self._device = device
        self.mark: Callable[[], Reading] = time.perf_counter if device is None else self._device_mark

    def _device_mark(self) -> Reading:
        assert self._device is not None
        return None if self._device.captures() else self._device.mark()

    def wait(self) -> bool:
        """Wait until all marks can be read; False if they cannot, because that would abort a graph capture."""
        if self._device is None:
            return True
        if self._device.captures():
            return False
        self._device.synchronize()
        return True

    def seconds(self, begin: Reading, end: Reading) -> float:
        """Between two marks; 0 where they are in different queues and the later one was reached first."""
        if isinstance(begin, Mark) and isinstance(end, Mark) and self._device is not None:
            return max(0.0, self._device.elapsed_seconds(begin, end))
        return end - begin if isinstance(begin, float) and isinstance(end, float) else 0.0


class OpenRow(NamedTuple):
    """A watched step whose marks have not been read."""

    begin: Reading
    end: Reading
    spans: list[Span]
    backwards: int
    page_faults: int
    step: int | None = None


class Spans:
    """Nested timed calls; each kind gets the time not spent in inner calls."""

    def __init__(self, timeline: Timeline | None = None) -> None:
        self.timeline = timeline or Timeline()
        self._closed: list[Span] = []
        self._open: list[Span] = []

    def enter(self, kind: str) -> Span:
        span = Span(kind, self.timeline.mark())
        self._open.append(span)
        return span

    def leave(self, span: Span) -> None:
        end = self.timeline.mark()
        if not any(one is span for one in self._open):
            return  # it was opened before the window, or before the step that just ended
        while self._open.pop() is not span:
            pass  # an exception skipped its end; its time goes to the outer one
        span.end = end
        self._closed.append(span)
        if self._open:
            self._open[-1].inner.append(span)

    def move(self, kind: str, to: str) -> None:
        """Reassign what was of one kind until now to another."""
        for span in self._closed:
            if span.kind == kind:
                span.kind = to

    def take(self) -> list[Span]:
        """Spans closed since the last call; open ones are dropped."""
        closed, self._closed = self._closed, []
        self._open.clear()
        return closed

    def read(self, row: OpenRow) -> StepRow:
        seconds = self.timeline.seconds(row.begin, row.end)
        parts: dict[str, float] = {}
        for span in row.spans:
            inner = sum(self.timeline.seconds(one.begin, one.end) for one in span.inner)
            own = max(0.0, self.timeline.seconds(span.begin, span.end) - inner)
            parts[span.kind] = parts.get(span.kind, 0.0) + own
        parts.pop("other", None)  # a call that turned out not to cross devices
        parts["other"] = max(0.0, seconds - sum(parts.values()))
        return StepRow(
            seconds=seconds, parts=parts, backwards=row.backwards, page_faults=row.page_faults, step=row.step
        )
