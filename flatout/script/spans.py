"""Where the time of a watched step went: nested timed calls of a few kinds.

A GPU works behind the program: the time that a call takes says how long it took to queue its work, or to wait for all
that was queued before. There each call leaves marks in the GPU's own queue, and its time is the GPU's time between
them, its work and what it stood idle for. They are read when the window is closed, so that no step waits for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from flatout.machine.device import Device, Mark

Reading = float | Mark | None
"""Of the host's clock, or a mark of the device; None: none could be made."""
KINDS = ("data", "transfer", "forward", "backward", "optimizer", "sync", "evaluation", "other")


@dataclass
class StepRow:
    """One watched step: its length and where it went, in seconds."""

    seconds: float
    parts: dict[str, float] = field(default_factory=dict)
    backwards: int = 1
    page_faults: int | None = None
    """Minor ones, of all threads; None: not counted."""


@dataclass
class Span:
    """One timed call and those inside it; `kind` may change until it is read."""

    kind: str
    begin: Reading
    end: Reading = None
    inner: list[Span] = field(default_factory=list)


class Timeline:
    """What marks are made of: readings of the host's clock, or, where a device is given, events of its own.

    While the script captures a CUDA graph nothing runs: marks are None then, and the time between them is none.
    """

    def __init__(self, device: Device | None = None) -> None:
        self._device = device
        self.mark: Callable[[], Reading] = time.perf_counter if device is None else self._device_mark

    def _device_mark(self) -> Reading:
        assert self._device is not None
        return None if self._device.captures() else self._device.mark()

    def wait(self) -> bool:
        """Until all marks can be read; False if they cannot be, because that would break a capture off."""
        if self._device is None:
            return True
        if self._device.captures():
            return False
        self._device.synchronize()
        return True

    def seconds(self, begin: Reading, end: Reading) -> float:
        """Between two marks; none where marks were made in two queues and the later one was passed first."""
        if isinstance(begin, Mark) and isinstance(end, Mark) and self._device is not None:
            return max(0.0, self._device.elapsed_seconds(begin, end))
        return end - begin if isinstance(begin, float) and isinstance(end, float) else 0.0


class OpenRow(NamedTuple):
    """A watched step whose marks were not read yet."""

    begin: Reading
    end: Reading
    spans: list[Span]
    backwards: int
    page_faults: int


class Spans:
    """Nested timed calls; each kind gets the time that no inner call took."""

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
            pass  # an exception left it; its time is the outer one's
        span.end = end
        self._closed.append(span)
        if self._open:
            self._open[-1].inner.append(span)

    def move(self, kind: str, to: str) -> None:
        """What was of one kind until now is of another."""
        for span in self._closed:
            if span.kind == kind:
                span.kind = to

    def take(self) -> list[Span]:
        """Those that were left since the last call; those that are open are forgotten."""
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
        parts.pop("other", None)  # a device call that turned out to be none
        parts["other"] = max(0.0, seconds - sum(parts.values()))
        return StepRow(seconds=seconds, parts=parts, backwards=row.backwards, page_faults=row.page_faults)
