"""What is known of a run of a script: its record, what was seen of it, what of a plan was applied, the findings."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flatout.diagnose.checks import check_facts
from flatout.diagnose.facts import Facts, RunFacts
from flatout.diagnose.finding import Finding
from flatout.levers.observed import Observed
from flatout.machine.description import Machine
from flatout.machine.detect import detect
from flatout.machine.process_memory import peak_resident_bytes
from flatout.plan import Plan
from flatout.script.describe import observe
from flatout.script.entry import Target
from flatout.script.memory_death import MemoryDeath, inspect_death
from flatout.script.process_record import Others, Place, ProcessRecord, in_order, place_now, process_record
from flatout.script.runner import Runner, RunRecord
from flatout.timing import Load


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """What is known when a script has ended."""

    name: str
    arguments: tuple[str, ...]
    status: int | None
    """The script's exit code; None if it is not known how it ended."""
    wall_seconds: float
    cpu_seconds: float
    """Of the script's own process, like the peak."""
    peak_resident_bytes: int
    record: RunRecord
    observed: Observed | None
    machine: Machine | None
    plan: Plan | None
    applied: tuple[str, ...]
    rolled_back: tuple[tuple[str, str], ...]
    left_off: tuple[tuple[str, str], ...]
    """(choice, why it does not apply to this run)"""
    plan_notes: tuple[str, ...]
    findings: tuple[Finding, ...]
    load: Load | None = None
    """What kept the processor busy during the steps; None: too short to measure."""
    death: MemoryDeath | None = None
    """Where the script ran out of memory."""
    samples_per_step: float | None = None
    tokens_per_step: float | None = None
    samples_reasons: Mapping[str, str] = field(default_factory=dict)
    """Why what of these is None is unknown."""
    children_cpu_seconds: float = 0.0
    """Of processes that it started, and that have ended."""
    began: float | None = None
    """When the script was started, on the clock of time.perf_counter()."""
    processes: tuple[ProcessRecord, ...] = ()
    """Where several trained: all that did, the script's own first."""

    @property
    def flops_per_step(self) -> float | None:
        """As tune counted it, or as one step of this run was counted."""
        planned = self.plan.flops_per_step if self.plan is not None else None
        return planned if planned is not None else self.record.flops_per_step


def summarise(
    target: Target,
    runner: Runner,
    *,
    status: int | None,
    plan: Plan | None,
    notes: Sequence[str],
    machine: Machine | None,
    began: float,
    times_before: os.times_result,
    others: Others | None = None,
) -> RunSummary:
    """What is known now, while the script runs or when it has ended.

    notes: what was said of the plan before the script started. machine: None: detected now. times_before: os.times()
    when it began. others: processes that trained beside this one.
    """
    record, watch, applied, times = runner.record, runner.watch, runner.applied, os.times()
    wall, machine = time.perf_counter() - began, machine or detect()
    observed = None
    if record.steps:
        observed = observe(watch, threads_at_start=runner.threads_at_start, rows=record.rows, loaders=False)
    rolled_back = tuple((entry.choice.label, entry.reason) for entry in applied.rolled_back)
    rolled_back += tuple(watch.subject.incidents)
    others = others or Others()
    processes = _processes(runner, others, started_at=time.time() - wall)
    said = [*notes, *([runner.fault] if runner.fault is not None else [])]
    said += [f"left off: {label} ({why})" for label, why in runner.left_off]
    load = runner.load()
    facts = Facts(
        observed=observed,
        contended=load is not None and load.contended,
        planned=plan is not None,
        command=shlex.join(target.command),
        machine=machine,
        gpus=_usable_gpus(machine),
        run=RunFacts(
            steps=record.steps,
            growth=record.growth(),
            nearly_out=record.nearly_out,
            rolled_back=rolled_back,
            epochs=runner.epochs,
            processes=len(others.started),
            ranks=processes,
            devices=others.devices,
        ),
    )
    return RunSummary(
        name=target.name,
        arguments=target.arguments,
        status=status,
        wall_seconds=wall,
        began=began,
        cpu_seconds=times.user + times.system - times_before.user - times_before.system,
        children_cpu_seconds=times.children_user
        + times.children_system
        - times_before.children_user
        - times_before.children_system,
        peak_resident_bytes=peak_resident_bytes(),
        record=record,
        observed=observed,
        machine=machine,
        plan=plan,
        applied=tuple(choice.label for choice in applied.choices),
        rolled_back=rolled_back,
        left_off=tuple(runner.left_off),
        plan_notes=tuple(said),
        findings=check_facts(facts),
        load=load,
        samples_per_step=runner.batches.samples_per_step,
        tokens_per_step=runner.batches.tokens_per_step,
        samples_reasons=runner.batches.reasons(),
        death=_death(runner),
        processes=processes,
    )


def _processes(runner: Runner, others: Others, *, started_at: float) -> tuple[ProcessRecord, ...]:
    """All that trained, in order; none where this process trained alone."""
    found = [*others.started, *others.ranks]
    if runner.record.steps and (found or others.place is not None):
        place = others.place or place_now(Place())
        by_script = others.place is not None
        found.append(
            process_record(runner, place=place, started_at=started_at, ended=True, started_by_script=by_script)
        )
    return in_order(found)


def _death(runner: Runner) -> MemoryDeath | None:
    """What is known where the script ran out of memory; None otherwise."""
    error = getattr(sys, "last_value", None)
    if not isinstance(error, Exception) or "torch" not in sys.modules:
        return None
    return inspect_death(error, runner.watch.subject)


def _usable_gpus(machine: Machine) -> tuple[str, ...]:
    cuda = getattr(sys.modules.get("torch"), "cuda", None)  # a script may have a module of its own by that name
    if cuda is None or not cuda.is_available():
        return ()
    return tuple(gpu.name for gpu in machine.devices)
