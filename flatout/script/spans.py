"""Where the time of a watched step went: nested timed calls of a few kinds."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

KINDS = ("data", "transfer", "forward", "backward", "optimizer", "sync", "evaluation", "other")


@dataclass
class StepRow:
    """One watched step: its length and where it went, in seconds."""

    seconds: float
    parts: dict[str, float] = field(default_factory=dict)
    backwards: int = 1
    page_faults: int | None = None
    """Minor ones, of all threads; None: not counted."""


class Spans:
    """Nested timed calls; each kind gets the time that no inner call took."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}
        self._open: list[list[Any]] = []

    def enter(self, kind: str) -> list[Any]:
        entry = [kind, time.perf_counter(), 0.0]
        self._open.append(entry)
        return entry

    def leave(self, entry: list[Any]) -> None:
        now = time.perf_counter()
        if not any(one is entry for one in self._open):
            return  # it was opened before the window, or before the step that just ended
        while self._open.pop() is not entry:
            pass
        seconds = now - entry[1]
        self.parts[entry[0]] = self.parts.get(entry[0], 0.0) + seconds - entry[2]
        if self._open:
            self._open[-1][2] += seconds

    def move(self, kind: str, to: str) -> None:
        if kind in self.parts:
            self.parts[to] = self.parts.get(to, 0.0) + self.parts.pop(kind)

    def take(self) -> dict[str, float]:
        parts, self.parts = self.parts, {}
        self._open.clear()
        return parts
