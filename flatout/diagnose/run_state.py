"""What is known of a run of a script while it goes on: a value of bounded size, made in a few hundred microseconds.

It is made in the script's own thread, at the end of a step; whoever shows it (the panel, a page, `flatout watch`) reads
this value and never the run's live objects.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TypeVar

from flatout import environment
from flatout.decoding import decode
from flatout.diagnose.checks import check_facts
from flatout.diagnose.facts import Facts, RunFacts
from flatout.diagnose.finding import Finding
from flatout.levers.observed import Observed
from flatout.machine.processes import pid_namespace, process_started
from flatout.plan import Plan
from flatout.script.describe import breakdown
from flatout.script.device_calls import device_name
from flatout.script.entry import Target
from flatout.script.epochs import NO_LOADER, TOO_EARLY, Epoch, Progress, progress
from flatout.script.runner import Runner, RunRecord, on_monotonic
from flatout.statistics import median

MOST_POINTS = 120
"""Of a curve."""
MOST_FINDINGS, MOST_NOTES = 20, 20
FINDINGS_EVERY_SECONDS = 30.0

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RunState:
    """A run, as of its last step that was looked at."""

    pid: int
    process_started: str | None
    """Distinguishes this process from a later one with the same number; None: unknown."""
    pid_namespace: str | None
    """Where `pid` counts: containers have their own numbers."""
    script: str
    started_at: float
    """Seconds since 1970, like `written_at`: to be shown. Durations are measured by a clock that never jumps."""
    written_at: float
    written_clock: float
    """time.monotonic(), the same for all processes since the machine was started."""
    run_seconds: float
    ended: bool = False
    status: int | None = None
    """The script's exit code; None while it runs."""
    visible_devices: str | None = None
    """CUDA_VISIBLE_DEVICES of the run."""
    ranks_folder: str | None = None
    """Where the ranks of a run on several devices keep their records; those of processes that the script starts are
    beside this state."""
    device: str | None = None
    """Where the weights are; None: no step was seen yet."""
    steps: int = 0
    step_seconds: float | None = None
    """Of recent steps."""
    last_step_clock: float | None = None
    """time.monotonic() at the end of the last step."""
    parts_seconds: Mapping[str, float] = field(default_factory=dict)
    """Where a step's time goes, in the steps of the last windows."""
    parts_step_seconds: float | None = None
    """The median of those steps."""
    epoch: Epoch | None = None
    epoch_unknown_because: str = ""
    samples_per_step: int | None = None
    samples_unknown_because: str = ""
    flops_per_step: float | None = None
    flops_unknown_because: str = ""
    resident_bytes: int | None = None
    tensors_peak_bytes: int | None = None
    tensors_held_bytes: int | None = None
    """Between steps; on a GPU as its allocator counts."""
    reserved_bytes: int | None = None
    """By the GPU's allocator; None on the CPU."""
    cpu_seconds: float = 0.0
    """Processor time of the process so far."""
    applied: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """What of a plan is not in force, and why."""
    findings: tuple[Finding, ...] = ()
    step_curve: tuple[float, ...] = ()
    """Seconds of steps, evenly from the whole run."""
    memory_curve: tuple[int, ...] = ()
    """Resident bytes, likewise."""

    def to_json(self) -> dict[str, object]:
        """Without a copy of every number, because it is made in the script's own thread."""
        epoch = None if self.epoch is None else asdict(self.epoch)
        return {**vars(self), "epoch": epoch, "findings": [one.to_json() for one in self.findings]}

    @classmethod
    def from_json(cls, data: object) -> RunState:
        return decode(cls, data)


class RunStates:
    """The states of one run, from its start to its end."""

    def __init__(
        self,
        target: Target,
        runner: Runner,
        *,
        plan: Plan | None,
        notes: Sequence[str],
        command: str,
        ranks_folder: str | None = None,
    ) -> None:
        """notes: what was said of the plan before the script started. command: the script, as a shell reads it."""
        self._ranks_folder = ranks_folder
        self._name, self._runner, self._plan = target.name, runner, plan
        self._notes, self._command = tuple(notes), command
        self._pid = os.getpid()
        self._process_started, self._pid_namespace = process_started(self._pid), pid_namespace()
        self._visible_devices = environment.visible_cuda_devices()
        self._started_at, self._began = time.time(), time.monotonic()
        self._findings: tuple[Finding, ...] = ()
        self._next_findings = 0.0
        self._rows = 0
        unknown = {"epoch_unknown_because": NO_LOADER, "samples_unknown_because": NO_LOADER}
        self._progress = Progress(epoch=None, samples_per_step=None, **unknown)

    def now(self, *, status: int | None = None, ended: bool = False) -> RunState:
        """In the script's own thread, between two steps."""
        clock, runner = time.monotonic(), self._runner
        record, subject = runner.record, runner.watch.subject
        seen = breakdown(record.rows)
        if record.steps and not ended:
            self._progress = self._progressed(record)
            if len(record.rows) != self._rows or clock >= self._next_findings:
                self._rows, self._next_findings = len(record.rows), clock + FINDINGS_EVERY_SECONDS
                self._findings = self._found(seen)[:MOST_FINDINGS]
        flops = self._plan.flops_per_step if self._plan is not None else None
        memory = record.memory[-1] if record.memory else None
        return RunState(
            pid=self._pid,
            process_started=self._process_started,
            pid_namespace=self._pid_namespace,
            script=self._name,
            started_at=self._started_at,
            written_at=time.time(),
            written_clock=clock,
            run_seconds=clock - self._began,
            ended=ended,
            status=status,
            visible_devices=self._visible_devices,
            ranks_folder=self._ranks_folder,
            device=device_name(subject) if record.steps else None,
            steps=record.steps,
            step_seconds=record.recent_seconds,
            last_step_clock=on_monotonic(record.last_step_at),
            parts_seconds=seen,
            parts_step_seconds=median([row.seconds for row in record.rows]) if record.rows else None,
            epoch=self._progress.epoch,
            epoch_unknown_because=self._progress.epoch_unknown_because,
            samples_per_step=self._progress.samples_per_step,
            samples_unknown_because=self._progress.samples_unknown_because,
            flops_per_step=flops or record.flops_per_step,
            flops_unknown_because="" if flops or record.flops_per_step else record.flops_reason,
            resident_bytes=record.resident[-1][2] if record.resident else None,
            tensors_peak_bytes=None if memory is None else memory.peak_bytes,
            tensors_held_bytes=None if memory is None else memory.held_bytes,
            reserved_bytes=None if memory is None else memory.reserved_bytes,
            cpu_seconds=time.process_time(),
            applied=tuple(choice.label for choice in runner.applied.choices),
            notes=self._not_in_force(),
            findings=self._findings,
            step_curve=_thinned(record.samples),
            memory_curve=tuple(one[2] for one in _thinned(record.resident)),
        )

    def _progressed(self, record: RunRecord) -> Progress:
        """What a step takes is known anew only some steps into an epoch; until then it is as in the epoch before."""
        found = progress(
            self._runner.watch,
            self._runner.epochs,
            steps=record.steps,
            first_step_at=record.first_step_at,
            now=time.perf_counter(),
        )
        if found.samples_unknown_because == TOO_EARLY and self._progress.samples_per_step is not None:
            return replace(found, samples_per_step=self._progress.samples_per_step, samples_unknown_because="")
        return found

    def _not_in_force(self) -> tuple[str, ...]:
        runner = self._runner
        taken = [f"rolled back {one.choice.label}: {one.reason}" for one in runner.applied.rolled_back]
        left = [f"left off {label}: {why}" for label, why in runner.left_off]
        fault = [runner.fault] if runner.fault is not None else []
        return (*self._notes, *taken, *left, *fault)[:MOST_NOTES]

    def _found(self, parts: Mapping[str, float]) -> tuple[Finding, ...]:
        """By the checks of a run, from what costs nothing to know. Whether torch could use a GPU is not asked: that
        would initialize CUDA in a script that has not."""
        runner, record = self._runner, self._runner.record
        observed = Observed(
            device=device_name(runner.watch.subject),
            step_seconds=median([row.seconds for row in record.rows]) if record.rows else None,
            breakdown_seconds=parts,
        )
        rolled_back = tuple((entry.choice.label, entry.reason) for entry in runner.applied.rolled_back)
        run = RunFacts(
            steps=record.steps,
            growth=record.growth(),
            nearly_out=record.nearly_out,
            rolled_back=rolled_back + tuple(runner.watch.subject.incidents),
            epochs=runner.epochs,
        )
        planned = self._plan is not None
        return check_facts(Facts(command=self._command, planned=planned, observed=observed, run=run))


def _thinned(values: Sequence[T]) -> tuple[T, ...]:
    """At most MOST_POINTS of them, with the last one."""
    stride = -(-len(values) // MOST_POINTS) or 1
    return tuple(reversed(values[::-1][::stride]))
