"""What is recorded of a run, however long: a bounded sample of step times, and where the time of some steps went.

Step times are sampled evenly: when the list is full, every other one is dropped and from then on half as many are
added. A run of a million steps needs as much memory as one of five thousand.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from flatout.script.growth import Growth, steady_growth
from flatout.script.spans import StepRow
from flatout.script.step_look import TOO_SHORT, StepSeen
from flatout.script.step_memory import MemorySample

MOST_SAMPLES = 4096
MOST_ROWS = 400
PAUSE_STEPS, PAUSE_SHARE = 2.0, 0.5
"""What exceeds the usual time by two steps and half of it is a pause, not variation between steps."""
LITTLE_LEFT_SHARE = 0.03
"""Share of the host's memory, or of the cgroup's limit, where the kernel soon kills the process."""


@dataclass
class RunRecord:
    """Filled step by step; read for its states while it runs, and for the summary."""

    steps: int = 0
    """Training steps, corrected in hindsight; the first is not timed."""
    timed: int = 0
    samples: list[float] = field(default_factory=list)
    stride: int = 1
    rows: list[StepRow] = field(default_factory=list)
    recent_seconds: float | None = None
    pauses: int = 0
    pause_seconds: float = 0.0
    """Between two steps, beyond what a step usually takes: evaluation, checkpoints, plots."""
    first_step_at: float | None = None
    last_step_at: float | None = None
    """On the clock of time.perf_counter(); the ends of steps."""
    resident: list[tuple[float, int, int]] = field(default_factory=list)
    """(clock, step, resident bytes), thinned like the samples."""
    memory: list[MemorySample] = field(default_factory=list)
    """Single steps, one after each window, thinned like the samples."""
    flops_per_step: float | None = None
    flops_reason: str = TOO_SHORT
    """Why the arithmetic of a step is not known."""

    nearly_out: tuple[int, int, int] | None = None
    """(step, available bytes, bytes in all) when hardly any of the host's memory was left for the first time."""

    def add_steps(self, seconds: float, steps: int) -> None:
        """Add steps that took this long together; their average is kept."""
        self.timed += 1
        usual, each = self.recent_seconds, seconds / steps
        if usual:
            beyond = seconds - steps * usual
            if beyond > (PAUSE_STEPS + PAUSE_SHARE * steps) * usual:
                self.pauses += 1
                self.pause_seconds += beyond
            self.recent_seconds = 0.95 * usual + 0.05 * min(each, (1 + PAUSE_STEPS) * usual)
        else:
            self.recent_seconds = each
        if self.timed % self.stride == 0:
            self.samples.append(each)
            if len(self.samples) >= MOST_SAMPLES:
                self.samples = self.samples[1::2]  # what the new stride would have kept
                self.stride *= 2

    def mark_step(self, now: float) -> None:
        """A step has ended at this time of time.perf_counter()."""
        if self.first_step_at is None:
            self.first_step_at = now
        self.last_step_at = now

    def add_rows(self, rows: Sequence[StepRow]) -> None:
        self.rows = (self.rows + list(rows))[-MOST_ROWS:]

    def add_resident(self, resident_bytes: int, now: float) -> None:
        self.resident.append((now, self.steps, resident_bytes))
        if len(self.resident) >= MOST_SAMPLES:
            self.resident = self.resident[::2]

    def note_memory_left(self, available_bytes: int, total_bytes: int) -> bool:
        """True the first time that hardly any is left."""
        if self.nearly_out is not None or available_bytes >= LITTLE_LEFT_SHARE * total_bytes:
            return False
        self.nearly_out = self.steps, available_bytes, total_bytes
        return True

    def add_look(self, seen: StepSeen) -> None:
        if self.flops_per_step is None:
            self.flops_per_step, self.flops_reason = seen.flops, seen.reason
        if seen.memory is None:
            return
        self.memory.append(seen.memory)
        if len(self.memory) >= MOST_SAMPLES:
            self.memory = self.memory[::2]

    @property
    def median_seconds(self) -> float | None:
        return statistics.median(self.samples) if self.samples else None

    def growth(self) -> Growth | None:
        """By how much the process grows; None where that is not beyond its scatter, or too little was seen."""
        return steady_growth(self.resident)


def on_monotonic(clock: float | None) -> float | None:
    """A reading of time.perf_counter() as one of time.monotonic(), which all processes share."""
    return None if clock is None else clock - time.perf_counter() + time.monotonic()
