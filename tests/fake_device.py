"""A device on a clock that the test moves: `work(seconds)` is queued, `synchronize` lets it happen."""

from __future__ import annotations

from flatout.machine.device import Mark


class FakeDevice:
    """In place of a GPU."""

    kind, name = "cuda", "cuda:0"

    def __init__(self) -> None:
        self.now_seconds = 0.0
        self.synchronizations = 0
        self.is_capturing = False
        self._queued_seconds = 0.0

    def work(self, seconds: float) -> None:
        """Queue that much work; the host continues at once."""
        self._queued_seconds += seconds

    def clock(self) -> float:
        """The host's clock, for `timing.measure(clock=...)`."""
        return self.now_seconds

    def synchronize(self) -> None:
        self.synchronizations += 1
        self.now_seconds, self._queued_seconds = self.now_seconds + self._queued_seconds, 0.0

    def mark(self) -> Mark:
        return Mark(seconds=self.now_seconds + self._queued_seconds)

    def elapsed_seconds(self, start: Mark, end: Mark) -> float:
        return (end.seconds or 0.0) - (start.seconds or 0.0)

    def captures(self) -> bool:
        return self.is_capturing

    def memory_peak_bytes(self) -> int | None:
        return None

    def reset_peak(self) -> None:
        """Its memory is not followed."""
