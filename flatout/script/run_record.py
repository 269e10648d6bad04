"""What is remembered of a run, however long: a bounded sample of step times, and where the time of some steps went.

Step times are kept evenly: when the list is full every other one goes and from then on half as many come in. A run of
a million steps costs as much memory as one of five thousand.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from flatout.script.step_memory import MemorySample
from flatout.script.watch import StepRow

MOST_SAMPLES = 4096
MOST_ROWS = 400
LITTLE_LEFT_SHARE = 0.03
"""Of the host's memory, or of what the cgroup allows: at its end the kernel kills without a word."""


@dataclass
class RunRecord:
    """Filled step by step; read by the live line and by the summary."""

    steps: int = 0
    """Training steps, counted in hindsight; of the first no time is known."""
    timed: int = 0
    samples: list[float] = field(default_factory=list)
    stride: int = 1
    rows: list[StepRow] = field(default_factory=list)
    recent_seconds: float | None = None
    resident: list[tuple[int, int]] = field(default_factory=list)
    """(step, resident bytes), thinned like the samples."""
    memory: list[MemorySample] = field(default_factory=list)
    """Single steps, one after each window, thinned like the samples."""

    nearly_out: tuple[int, int, int] | None = None
    """(step, available bytes, bytes in all) when hardly any of the host's memory was left for the first time."""

    def add_step(self, seconds: float) -> None:
        """One more step; where only every few steps were timed, their average."""
        self.timed += 1
        previous = self.recent_seconds
        self.recent_seconds = seconds if previous is None else 0.95 * previous + 0.05 * seconds
        if self.timed % self.stride == 0:
            self.samples.append(seconds)
            if len(self.samples) >= MOST_SAMPLES:
                self.samples = self.samples[1::2]  # what the new stride would have kept
                self.stride *= 2

    def add_rows(self, rows: Sequence[StepRow]) -> None:
        self.rows = (self.rows + list(rows))[-MOST_ROWS:]

    def add_resident(self, resident_bytes: int) -> None:
        self.resident.append((self.steps, resident_bytes))
        if len(self.resident) >= MOST_SAMPLES:
            self.resident = self.resident[::2]

    def note_memory_left(self, available_bytes: int, total_bytes: int) -> bool:
        """True the first time that hardly any is left."""
        if self.nearly_out is not None or available_bytes >= LITTLE_LEFT_SHARE * total_bytes:
            return False
        self.nearly_out = self.steps, available_bytes, total_bytes
        return True

    def add_memory(self, sample: MemorySample) -> None:
        self.memory.append(sample)
        if len(self.memory) >= MOST_SAMPLES:
            self.memory = self.memory[::2]

    @property
    def median_seconds(self) -> float | None:
        return statistics.median(self.samples) if self.samples else None

    def growth_bytes_per_step(self) -> float | None:
        """By how much each step enlarged the process in the later half of the run; None if too little was seen."""
        later = self.resident[len(self.resident) // 2 :]
        if len(later) < 5 or later[-1][0] == later[0][0]:
            return None
        half = len(later) // 2
        first = statistics.median(size for _, size in later[:half])
        second = statistics.median(size for _, size in later[half:])
        steps = statistics.median(step for step, _ in later[half:]) - statistics.median(
            step for step, _ in later[:half]
        )
        return (second - first) / steps if steps > 0 else None
