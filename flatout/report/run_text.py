"""A run that has ended, as a screen and as a document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from flatout.diagnose.run_summary import RunSummary
from flatout.report.document import document
from flatout.report.live_text import finding_lines
from flatout.report.rank_text import balance_fields, process_rows
from flatout.report.step_text import breakdown_text, counted_by, percent, share_of_ceiling, training_elsewhere
from flatout.script.memory_death import MemoryDeath
from flatout.script.process_record import own_spread, process_names, step_spread
from flatout.script.step_memory import MemorySample
from flatout.terminal import printable
from flatout.timing import contention, measurement
from flatout.units import format_bytes, format_number, format_seconds

KIND = "run"
LEAST_CORES_SHOWN = 0.05
"""Of processes that the script starts: with less, it has as good as none."""


def run_text(summary: RunSummary, report_path: str | None) -> str:
    record = summary.record
    seen = summary.observed
    parts = [summary.name, format_seconds(summary.wall_seconds), _steps(summary), counted_by(seen)]
    rows = [("script", " · ".join(filter(None, parts)))]
    if seen is not None and seen.step_seconds:
        rows.append(("step", breakdown_text(seen.breakdown_seconds, seen.step_seconds)))
        if outside := _outside_text(summary):
            rows.append(("", outside))
    rows += process_rows(summary.processes)
    if record.steps:
        share, of_what = _ceiling(summary)
        rows.append(("ceiling", of_what if share is None else f"{percent(share)} of the {of_what}"))
    rows.append(("memory", _use(summary)))
    if record.memory:
        rows.append(("", _tensors_text(record.memory)))
    if (others := contention(summary.load)) is not None:
        rows.append(("", others))
    rows.append(("plan", _applied(summary)))
    rows += [("", note) for note in summary.plan_notes]
    if summary.death is not None:
        rows += _death_rows(summary.death)
    rows += finding_lines(summary.findings)
    if report_path is not None:
        rows.append(("report", report_path))
    return "\n".join(f"{label:<10}{printable(text)}" for label, text in rows)


def _applied(summary: RunSummary) -> str:
    """In the script's own process, or else in those that it started to train in."""
    in_processes = [one.applied for one in summary.processes if one.applied]
    if not summary.applied and in_processes:
        count = len(in_processes)
        return f"{', '.join(in_processes[0])}, in {count} process{'es' * (count != 1)} that the script started"
    return ", ".join(summary.applied) or f"{_why_nothing_applied(summary)}: the script ran as it is"


def _why_nothing_applied(summary: RunSummary) -> str:
    if summary.plan is None:
        return "none"
    return "nothing of it was applied" if summary.plan.choices() else "it keeps nothing"


def _outside_text(summary: RunSummary) -> str:
    """Where else the time went; '' where there is nothing to tell."""
    record, began = summary.record, summary.began
    if began is None or record.first_step_at is None or record.last_step_at is None:
        return ""
    after = began + summary.wall_seconds - record.last_step_at
    between = f"{format_seconds(record.pause_seconds)} in {record.pauses} pause{'s' if record.pauses > 1 else ''}"
    parts = [f"{format_seconds(record.first_step_at - began)} until the first step ended"]
    parts += [f"{between} between steps"] if record.pauses else []
    parts += [f"{format_seconds(after)} after the last"]
    return f"outside these steps: {', '.join(parts)}"


def _tensors_text(samples: Sequence[MemorySample]) -> str:
    most, last = max(samples, key=lambda one: one.peak_bytes), samples[-1]
    if last.reserved_bytes is None:
        steps = f"the {len(samples)} steps" if len(samples) > 1 else "the one step"
        held = format_bytes(last.held_bytes)
        return f"tensors {format_bytes(most.peak_bytes)} at most in {steps} sampled, {held} between steps"
    share = last.fragmentation or 0.0
    return (
        f"GPU: {format_bytes(most.peak_bytes)} allocated at most, {format_bytes(last.held_bytes)} between steps, "
        f"{format_bytes(last.reserved_bytes)} reserved ({share:.0%} of it not in any tensor)"
    )


def _death_rows(death: MemoryDeath) -> list[tuple[str, str]]:
    wanted = f", asking for {format_bytes(death.requested_bytes)}" if death.requested_bytes is not None else ""
    parts = [f"{name} {format_bytes(size)}" for name, size in death.categories.items() if size]
    where = (
        "outside forward, backward and the optimizer step"
        if death.part == "other"
        else f"in the {death.part} part of a step"
    )
    rows = [("died of", f"memory, {where}{wanted}"), ("", death.line)]
    rows.append(("held", f"{format_bytes(death.held_bytes)} of tensors: {', '.join(parts)}"))
    rows += [("", f"{format_bytes(one.size_bytes):>9}  {one.name}  {one.line}".rstrip()) for one in death.holders]
    rows += [("remedy" if index == 0 else "", text) for index, text in enumerate(death.advice)]
    return rows


def _steps(summary: RunSummary) -> str:
    steps, median = summary.record.steps, summary.record.median_seconds
    if not steps and summary.processes:
        return training_elsewhere(len(summary.processes))
    if not steps:
        return "no training step found"
    counted = f"{steps:,} step{'s' if steps > 1 else ''}"
    if not median:
        return counted
    rates = (("samples", summary.samples_per_step), ("tokens", summary.tokens_per_step))
    known = "".join(f", {format_number(count / median)} {name}/s" for name, count in rates if count is not None)
    return f"{counted}, median {format_seconds(median)}{known}"


def _ceiling(summary: RunSummary) -> tuple[float | None, str]:
    """(the share that a median step reaches, of what), or (None, why it is unknown)."""
    if summary.flops_per_step is None:
        return None, f"unknown: {summary.record.flops_reason}"
    return share_of_ceiling(
        summary.flops_per_step,
        summary.record.median_seconds,
        summary.machine.ceilings if summary.machine else None,
        summary.observed.device if summary.observed is not None else None,
    )


def _use(summary: RunSummary) -> str:
    """Of memory and processors; the memory of processes that the script starts is not known, and may be shared."""
    wall = summary.wall_seconds
    own, theirs = (one / wall if wall else 0.0 for one in (summary.cpu_seconds, summary.children_cpu_seconds))
    most = f"{format_bytes(summary.peak_resident_bytes)} at most"
    if theirs < LEAST_CORES_SHOWN:
        return f"{most}; CPU {own:.1f} cores busy"
    busy = f"CPU {own + theirs:.1f} cores busy, {theirs:.1f} of them with processes that it started"
    return f"{most} in the script's own process; {busy}"


def run_document(summary: RunSummary, *, include_private: bool = False) -> dict[str, object]:
    """`measurement` holds the sampled steps, so that `flatout compare` can read it."""
    record, machine = summary.record, summary.machine
    growth = record.growth()
    share, ceiling = _ceiling(summary)
    payload: dict[str, object] = {
        "machine": machine.to_json() if machine is not None else None,
        "script": {"name": summary.name, "arguments": list(summary.arguments), "status": summary.status},
        "wall_seconds": summary.wall_seconds,
        "cpu_seconds": summary.cpu_seconds,
        "children_cpu_seconds": summary.children_cpu_seconds,
        "peak_resident_bytes": summary.peak_resident_bytes,
        "steps": record.steps,
        "step_sample_stride": record.stride,
        "samples_per_step": summary.samples_per_step,
        "tokens_per_step": summary.tokens_per_step,
        "samples_unknown_because": dict(summary.samples_reasons),
        "memory": [asdict(sample) for sample in record.memory],
        "outside_of_steps": {
            "before_seconds": record.first_step_at - summary.began if record.first_step_at and summary.began else None,
            "pauses": record.pauses,
            "pause_seconds": record.pause_seconds,
        },
        "load": asdict(summary.load) if summary.load is not None else None,
        "growth": asdict(growth) if growth is not None else None,
        "observed": summary.observed.to_json() if summary.observed is not None else None,
        "plan": summary.plan.choices() if summary.plan is not None else {},
        "applied": list(summary.applied),
        "left_off": [{"label": label, "reason": reason} for label, reason in summary.left_off],
        "rolled_back": [{"label": label, "reason": reason} for label, reason in summary.rolled_back],
        "plan_notes": list(summary.plan_notes),
        "flops_per_step": summary.flops_per_step,
        "flops_unknown_because": record.flops_reason if summary.flops_per_step is None else None,
        "ceiling": ceiling if record.steps else None,
        "ceiling_share": share,
        "out_of_memory": summary.death.to_json() if summary.death is not None else None,
        "findings": [finding.to_json() for finding in summary.findings],
    }
    if summary.processes:
        spreads = {"step": step_spread(summary.processes), "outside_backward": own_spread(summary.processes)}
        names = process_names(summary.processes)
        processes = zip(names, summary.processes, strict=True)
        payload["processes"] = [{"name": name, **one.to_json()} for name, one in processes]
        payload |= balance_fields(summary.processes)
        payload["process_spread"] = {
            name: None if spread is None else {**asdict(spread), "share": spread.share}
            for name, spread in spreads.items()
        }
    if record.samples:
        payload["measurement"] = measurement(
            "step",
            record.samples,
            machine_fingerprint=machine.fingerprint if machine is not None else None,
            load=summary.load,
        ).to_json()
    return document(KIND, payload, include_private=include_private)
