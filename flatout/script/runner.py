"""A real run of a script: apply a plan's levers, watch short windows of steps, keep a bounded record.

The first recognized step runs plain: it shows the model, the optimizer and the loader. Then the levers are turned on,
except those that do not apply to what was observed: a plan never overrides what the script sets itself, which its
arguments may have changed. Levers that save memory, or that must be on from the start, are on from the start. `failure`
describes what happens when the script fails under them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING

from flatout.environment import thread_variables
from flatout.errors import describe_error
from flatout.levers.applied import Applied
from flatout.levers.lever import Choice
from flatout.levers.observed import Observed
from flatout.machine.description import Machine
from flatout.machine.detect import memory_left
from flatout.machine.process_memory import resident_bytes
from flatout.script.batch_count import BatchCount
from flatout.script.describe import NOT_AS_NOW, observe
from flatout.script.device_calls import device_name
from flatout.script.epochs import EpochStarts
from flatout.script.growth import Growth, steady_growth
from flatout.script.own_modules import own_imports
from flatout.script.patches import ImportWatch
from flatout.script.spans import StepRow
from flatout.script.step_look import TOO_SHORT, StepLook, StepSeen
from flatout.script.step_memory import MemorySample
from flatout.script.watch import Watch
from flatout.signals import raised_by_handler
from flatout.timing import Load, LoadWatch

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

FIRST_WINDOW_STEP, WINDOW_STEPS = 10, 30
WINDOW_EVERY_SECONDS = 30.0
WINDOW_LONGEST_SECONDS = 10.0
RESIDENT_EVERY_SECONDS = 1.0
MEMORY_LEFT_EVERY_SECONDS, LESS_LEFT_BYTES = 5.0, 64 << 20
"""Reading the host's available memory takes a millisecond: at this interval, or when this process has grown this
much."""
QUICK_STEP_SECONDS = 2e-3
QUICK_WINDOW_STEPS = 10
BOUNDARY_SECONDS, MOST_STEPS_A_BOUNDARY = 50e-3, 256
"""Quick steps are timed several at a time, for about this long: a boundary costs 20 to 100 us with cold caches."""
MOST_SAMPLES = 4096
MOST_ROWS = 400
PAUSE_STEPS, PAUSE_SHARE = 2.0, 0.5
"""What exceeds the usual time by two steps and half of it is a pause, not variation between steps."""
LITTLE_LEFT_SHARE = 0.03
"""Share of the host's memory, or of the cgroup's limit, where the kernel soon kills the process."""


@dataclass
class RunRecord:
    """What is recorded of a run, however long; read for its states while it runs, and for the summary.

    Step times are sampled evenly: when the list is full, every other one is dropped and from then on half as many are
    added. A run of a million steps needs as much memory as one of five thousand.
    """

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


class Runner:
    """Installed before the script starts; `record` and `watch` are read while it runs and after."""

    def __init__(
        self,
        choices: Sequence[Choice] = (),
        machine: Machine | None = None,
        *,
        proved_for: str | None = None,
        only_for: str | None = None,
    ) -> None:
        """machine: None skips the check whether each lever applies. proved_for: the loop (`Observed.loop`) for which
        levers of lower precision were proved; only_for: for which all of them were; None: any."""
        self.watch = Watch()
        self.record = RunRecord()
        self.epochs = EpochStarts()
        self.batches = BatchCount(self.watch.subject)
        self._look = StepLook(self.watch.subject)
        self.at_alarm: list[Callable[[], None]] = []
        """Called once when hardly any of the host's memory is left: whatever is to survive must be written now."""
        self.at_second: list[Callable[[float], None]] = []
        """Called with the clock about once a second, at the end of a step, in the script's thread."""
        self.applied = Applied(self.watch.subject)
        self.left_off: list[tuple[str, str]] = []
        """(lever, why it does not apply to this run)"""
        self.threads_at_start: int | None = None
        self._load_watch: LoadWatch | None = None
        self._machine, self._proved_for, self._only_for = machine, proved_for, only_for
        self._thread_variables = thread_variables()
        self.fault: str | None = None
        """Why the script could not be watched: an error of ours, which must not reach the script."""
        self._choices = list(choices)
        self._early = [choice for choice in choices if choice.lever.switch != "live" or choice.lever.aim == "memory"]
        """What must be on before there is a loader, or before a first step that might not fit in memory."""
        self._last_boundary: float | None = None
        self._steps_at_boundary = 0
        self._next_window = 0.0
        self._window_began = 0.0
        self._next_resident = self._next_memory_left = 0.0
        self._resident_then = 0
        self.watch.at_boundary.append(self._boundary)
        self.watch.at_iterator.append(self._iterator_made)
        self.watch.at_batch.append(self._batch_drawn)

    def install(self) -> None:
        """Wait for the script to import torch; do nothing before."""
        ImportWatch({"torch": self._torch_imported}).install()

    def _torch_imported(self, torch: ModuleType) -> None:
        try:
            by_variable = thread_variables() != self._thread_variables  # by the script, before it imported torch
            self.threads_at_start = NOT_AS_NOW if by_variable else torch.get_num_threads()
            self.watch.install(torch)
            self._apply(self._early)
        except Exception as error:
            self._give_up(error)

    def _apply(self, choices: Sequence[Choice]) -> None:
        if choices or self.applied.choices:
            with own_imports():
                self.applied.set(choices)

    def _give_up(self, error: Exception) -> None:
        """Of an error of ours; one that a signal handler of the script raised meanwhile is the script's."""
        if raised_by_handler(error):
            raise error
        self.fault = f"Flatout could not watch this script: {describe_error(error)}"
        self.watch.uninstall()

    def _iterator_made(self, loader: DataLoader[object], began: float) -> None:
        self.epochs.iterator_made(loader, began, self.watch.finder.steps)

    def _batch_drawn(self, loader: DataLoader[object] | None, batch: object) -> None:
        try:
            self.batches.batch(loader, batch)
        except Exception as error:
            self._give_up(error)

    def _boundary(self) -> None:
        try:
            self._step_ended()
        except Exception as error:
            self._give_up(error)

    def _step_ended(self) -> None:
        now = time.perf_counter()
        self.record.steps = self.watch.finder.steps
        self.record.mark_step(now)
        self.batches.step_ended()
        if self._last_boundary is None:
            if self.watch.finder.kind is None:
                return
            self._apply(self._fitting())
            with own_imports():
                self._load_watch = LoadWatch()
            self._mark_boundary()
            return
        self.epochs.step_ended(now, self.record.recent_seconds)
        if self._look.under_way:  # an inspected step takes longer: it is not a sample
            self._end_look()
        else:
            self.record.add_steps(now - self._last_boundary, self.watch.steps - self._steps_at_boundary)
            self._manage_window(now)
            if self.watch.suspended:  # the first steps are slow: how many to time at once shows later
                self.watch.boundary_every = self._steps_a_boundary()
        if now >= self._next_resident:
            self._next_resident = now + RESIDENT_EVERY_SECONDS
            self._note_memory(now)
            for callback in self.at_second:
                callback(now)
        self._mark_boundary()

    def _note_memory(self, now: float) -> None:
        resident = resident_bytes()
        self.record.add_resident(resident, now)
        if now < self._next_memory_left and resident < self._resident_then + LESS_LEFT_BYTES:
            return
        self._next_memory_left, self._resident_then = now + MEMORY_LEFT_EVERY_SECONDS, resident
        if self.record.note_memory_left(*memory_left()):
            for callback in self.at_alarm:
                callback()

    def _fitting(self) -> list[Choice]:
        """The plan's choices without those that do not apply, given the first step."""
        if self._machine is None or not self._choices:
            return self._choices
        observed = observe(self.watch, threads_at_start=self.threads_at_start, rows=(), lengths=False)
        fitting = []
        for choice in self._choices:
            obstacle = self._obstacle(choice, self._machine, observed)
            if obstacle:
                self.left_off.append((choice.label, obstacle))
            else:
                fitting.append(choice)
        return fitting

    def _obstacle(self, choice: Choice, machine: Machine, observed: Observed) -> str:
        """Why a choice is left off here; '' if it is not. What was on from the start is not checked again."""
        if choice.lever.switch != "live":
            return ""
        if self._only_for not in (None, observed.loop):
            return f"the plan is for {self._only_for}; this process trains {observed.loop}"
        if choice.exactness == "reduced" and self._proved_for not in (None, observed.loop):
            return f"it was proved for {self._proved_for or 'an unnamed loop'}; this run trains {observed.loop}"
        verdict = choice.lever.applies(machine, observed)
        return "" if verdict else verdict.reason

    def _mark_boundary(self) -> None:
        self._last_boundary, self._steps_at_boundary = time.perf_counter(), self.watch.steps

    def busy_share(self) -> float | None:
        """Of all cores, whoever used them since the first step; None where that is too short to measure."""
        return None if self._load_watch is None else self._load_watch.busy_share()

    def load(self) -> Load | None:
        """The processor's load since the first step; None where that is too short to measure."""
        if self._load_watch is None:
            return None
        with own_imports():
            return self._load_watch.read()

    def ended(self) -> None:
        """The script has ended: stop watching and complete the record."""
        self.watch.look = None
        self.watch.disable()
        self.watch.count_passed()
        self.record.steps = self.watch.finder.steps
        self.record.add_rows(self.watch.close_window())

    def _manage_window(self, now: float) -> None:
        """Open a window after the first steps and then every half minute; shorter where steps are quick."""
        rows = self.watch.rows
        if rows is None:
            if self.record.steps >= FIRST_WINDOW_STEP and now >= self._next_window:
                self._window_began = now
                self.watch.resume()
                if self.watch.suspended:  # it could not: the script has its own patches there
                    self._next_window = now + WINDOW_EVERY_SECONDS
                else:
                    self.watch.open_window()
            return
        step_seconds = self.record.recent_seconds or QUICK_STEP_SECONDS
        quick = step_seconds < QUICK_STEP_SECONDS
        enough = len(rows) >= (QUICK_WINDOW_STEPS if quick else WINDOW_STEPS)
        if enough or now - self._window_began > WINDOW_LONGEST_SECONDS:
            self.record.add_rows(self.watch.close_window())
            self._next_window = now + WINDOW_EVERY_SECONDS
            compiles = any(choice.lever.compiles for choice in self._choices)
            self._look.begin(device_name(self.watch.subject), compiled=compiles)
            self.watch.look = self._look

    def _end_look(self) -> None:
        self.watch.look = None
        self.record.add_look(self._look.end(self.record.steps))
        self.watch.suspend(self._steps_a_boundary())  # nothing, where a lever wraps calls: the watch calls the lever

    def _steps_a_boundary(self) -> int:
        step_seconds = self.record.recent_seconds or QUICK_STEP_SECONDS
        return min(max(1, int(BOUNDARY_SECONDS / step_seconds)), MOST_STEPS_A_BOUNDARY)
