"""What tuning a script or a training step found, as a screen for people and as a document for programs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict

from flatout.private_details import without_private
from flatout.report.devices_text import tuned_lines
from flatout.report.document import document
from flatout.report.machine_text import machine_line
from flatout.report.step_text import breakdown_text, counted_by, percent, share_of_ceiling
from flatout.script.entry import Target
from flatout.search.lines import BudgetOption, not_tried_lines, ratio_text, reach_lines, seconds_argument, trial_lines
from flatout.terminal import printable
from flatout.timing import measurement
from flatout.tuning.fitting import Fit
from flatout.tuning.results import Proof, StepSubject, Tuned
from flatout.tuning.whole_run import WholeRun
from flatout.tuning.windows import FewSteps
from flatout.units import counted, format_bytes, format_seconds, labelled

KIND = "tune"


def tune_text(result: Tuned, option: BudgetOption = seconds_argument) -> str:
    """The whole result on one screen; `option`: how more time is asked for."""
    rows = [("machine", machine_line(result.machine)), _subject(result)]
    rows += [("", line) for line in _whole_runs(result.state.few_steps)]
    fit = result.state.fit
    weighed = [] if fit is None else fit.trials
    rows += labelled("to fit", trial_lines(weighed))
    rows += labelled("tried", trial_lines([trial for trial in result.trials if trial not in weighed]))
    rows += labelled("not tried", not_tried_lines(result.state.not_tried))
    on_one = "on one device: " if result.devices is not None else ""
    rows += [("result", on_one + _result(result, option))]
    rows += [("", line) for line in reach_lines(result.state, option)]
    rows += [("", line) for line in _whole_run(result.whole)]
    rows += labelled("memory", ([] if fit is None else fit_lines(fit)) + _resident_lines(result))
    rows += [("", line) for line in proof_lines(result.proof)]
    if result.devices is not None:
        rows += tuned_lines(result.devices, option)
    rows += [("note", text) for text in result.warnings]
    return "\n".join(f"{label:<10}{printable(text)}" for label, text in rows)


def ceiling_share(result: Tuned, step_seconds: float | None) -> tuple[float | None, str]:
    """(share, of what): FLOPs of a step over what the fastest float GEMM of this machine does in that time."""
    device, flops = result.state.first_observed.device, result.state.flops_per_step
    if flops is not None and device.startswith("cpu"):
        flops *= result.ranks or 1  # they share the cores
    return share_of_ceiling(flops, step_seconds, result.machine.ceilings, device)


def _subject(result: Tuned) -> tuple[str, str]:
    seen, subject = result.state.first_observed, result.subject
    step = f"step {breakdown_text(seen.breakdown_seconds, seen.step_seconds)}" if seen.step_seconds else "no step timed"
    name = subject.name if result.ranks is None else f"{subject.name} in {counted(result.ranks, 'rank')}"
    parts = [name, step, counted_by(seen), _share(result, seen.step_seconds)]
    if not isinstance(subject, StepSubject):
        return "script", " · ".join(filter(None, parts))
    read = f"{subject.batches} batch{'es' * (subject.batches != 1)}, which stay in memory: loading is not tuned"
    parts[0] = f"{subject.model} on {seen.device}"
    return "model", " · ".join(filter(None, [*parts, read]))


def _whole_runs(few: FewSteps | None) -> list[str]:
    if few is None:
        return []
    return [
        f"{few.steps} steps, too few to switch levers within a run: whole runs were compared, each over its last "
        f"{few.compared} steps, those with levers on include their start-up cost; times are per step, on average"
    ]


def _share(result: Tuned, step_seconds: float | None) -> str:
    share, of_what = ceiling_share(result, step_seconds)
    return f"share of the ceiling: {of_what}" if share is None else f"{percent(share)} of the {of_what}"


def _result(result: Tuned, option: BudgetOption) -> str:
    final, of_step = result.speedup, isinstance(result.subject, StepSubject)
    why = result.no_speedup_because(option)
    if not result.state.kept:
        share = _share(result, result.baseline_seconds)
        return f"{why}; the {'step' if of_step else 'script'} runs as it is, {share}"
    if final is None or result.final is None:
        return why
    times = f"{format_seconds(result.final.baseline_seconds)} -> {format_seconds(result.final.candidate_seconds)}"
    pairs = f"{final.pairs} window pairs"
    if result.state.few_steps is not None:
        times, pairs = f"{times} a step", f"{final.pairs} pairs of whole runs"
    speed = f"{ratio_text(final)} ({times}, fresh {'copies' if of_step else 'processes'}, {pairs})"
    if final.verdict != "faster":
        speed += f", {final.verdict}"
    if of_step:
        speed += f": {', '.join(f'{choice.field} = {choice.value}' for choice in result.state.kept)}"
    return f"{speed} · {_share(result, result.final.candidate_seconds)}"


def _whole_run(whole: WholeRun | None) -> list[str]:
    """Start-up, and what is left of the gain after it."""
    if whole is None:
        return []
    own, levers = whole.own_start_seconds, whole.lever_start_seconds
    text = f"start-up {format_seconds(own)} for Flatout"
    if levers is not None:
        parts = f"{format_seconds(own)} for Flatout, {format_seconds(levers)} levers"
        text = f"start-up {format_seconds(own + levers)} ({parts})"
    if whole.payoff_steps is not None:
        text += f", earned back after {counted(whole.payoff_steps, 'step')}"
    if whole.steps is None or whole.plain_seconds is None or whole.planned_seconds is None:
        return [text]
    times = f"{format_seconds(whole.plain_seconds)} -> {format_seconds(whole.planned_seconds)}"
    return [text, f"a whole run of {whole.steps:,} steps, start-up included: x{whole.ratio:.2f} ({times})"]


def fit_lines(found: Fit) -> list[str]:
    """For people: before and after, and whether that is what was asked for."""
    limit, plain = format_bytes(found.limit_bytes), format_bytes(found.plain_bytes)
    if found.planned_bytes is None:
        unknown = f"with the plan they were not measured: nothing shows that they stay within {limit}"
        return [f"a step's tensors took {plain}; {unknown}"]
    verdict = "within" if found.holds else "NOT within"
    return [f"a step's tensors take {plain} -> {format_bytes(found.planned_bytes)}, {verdict} {limit}"]


def _resident_lines(result: Tuned) -> list[str]:
    """The memory of the whole process; none where it was not measured."""
    peaks = result.peak_resident_bytes
    if peaks is None:
        return []
    plain, planned, total = (format_bytes(size) for size in (*peaks, result.machine.memory_total_bytes))
    return [f"peak of the process {plain} -> {planned}, of {total}"]


def proof_lines(proof: Proof | None) -> list[str]:
    """The verdict with its horizon, each claim, and what was seen; none where nothing was proved."""
    if proof is None:
        return []
    lines = [f"numbers {proof.verdict} {_horizon(proof)}"]
    width = max(len(claim.verdict) for claim in proof.claims) if proof.claims else 0
    lines += [f"  {claim.verdict:<{width}}  {', '.join(claim.levers)}: {claim.reason}" for claim in proof.claims]
    seen = []
    if proof.loss_difference is not None:
        seen.append(f"loss {proof.loss_difference:.1e} (noise floor {floor_text(proof.loss_floor)})")
    if proof.gradient_difference is not None:
        seen.append(f"gradient of a parameter {proof.gradient_difference:.1e} ({floor_text(proof.gradient_floor)})")
    if seen:
        lines.append("  largest relative differences from the same state: " + ", ".join(seen))
    return lines + list(proof.notes)


def _horizon(proof: Proof) -> str:
    """Over what the claim was proved; what comes later in the script was not seen."""
    if proof.epochs is None:
        return f"over {proof.steps} steps"
    if proof.covers_epochs:
        return f"over {proof.steps} steps, {proof.epochs:.1f} epochs"
    return f"over {proof.steps} steps, {proof.epochs:.2g} of an epoch: what changes between epochs was not seen"


def floor_text(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1e}"


def tune_document(
    result: Tuned, option: BudgetOption = seconds_argument, *, include_private: bool = False
) -> dict[str, object]:
    """Everything, for programs. `measurement` is the planned step, so that `flatout compare` can read it."""
    return document(KIND, tune_payload(result, option, include_private=include_private))


def tune_payload(
    result: Tuned, option: BudgetOption = seconds_argument, *, include_private: bool = False
) -> dict[str, object]:
    """The document without its header."""
    share_before, ceiling = ceiling_share(result, result.baseline_seconds)
    share_after, _ = ceiling_share(result, result.best_seconds)
    payload = {
        "machine": result.machine.to_json(),
        **_subject_document(result.subject),
        "observed": result.state.first_observed.to_json(),
        "flops_per_step": result.state.flops_per_step,
        "ceiling": ceiling,
        "ceiling_share_before": share_before,
        "ceiling_share_after": share_after,
        "trials": [trial.to_json() for trial in result.trials],
        "not_tried": [entry.to_json() for entry in result.state.not_tried],
        "kept": [choice.label for choice in result.state.kept],
        "fit": None if result.state.fit is None else _fit(result.state.fit),
        "plan": result.plan.choices(),
        "sources": list(result.plan.sources),
        "exactness": result.plan.exactness,
        "speedup": None if result.speedup is None else result.speedup.to_json(),
        "reason": result.no_speedup_because(option),
        "final": None if result.final is None else _final(result),
        "proof": None if result.proof is None else result.proof.to_json(),
        "devices": None if result.devices is None else result.devices.to_json(),
        "whole_run": None if result.whole is None else asdict(result.whole),
        "isolation": result.state.isolation,
        "total_steps": result.state.total_steps,
        "ranks": result.ranks,
        "few_steps": None if result.state.few_steps is None else asdict(result.state.few_steps),
        "budget_seconds": result.budget_seconds,
        "seconds": result.seconds,
        "warnings": list(result.warnings),
    }
    if result.final is not None:
        payload["measurement"] = measurement(
            "planned step", list(result.final.candidate_medians), machine_fingerprint=result.machine.fingerprint
        ).to_json()
    found = {name: _finite(value) for name, value in payload.items()}
    return found if include_private else without_private(found)


def _subject_document(subject: Target | StepSubject) -> dict[str, object]:
    if isinstance(subject, StepSubject):
        return {"step": asdict(subject)}
    return {"script": {"name": subject.name, "arguments": list(subject.arguments)}}


def _fit(found: Fit) -> dict[str, object]:
    return {
        "limit_bytes": found.limit_bytes,
        "plain_bytes": found.plain_bytes,
        "planned_bytes": found.planned_bytes,
        "holds": found.holds,
        "trials": [trial.to_json() for trial in found.trials],
    }


def _final(result: Tuned) -> dict[str, object]:
    assert result.final is not None
    return {
        "comparison": result.final.comparison.to_json(),
        "baseline_seconds": result.final.baseline_seconds,
        "candidate_seconds": result.final.candidate_seconds,
        "startup_seconds": result.final.startup_seconds,
        "baseline_medians": list(result.final.baseline_medians),
        "candidate_medians": list(result.final.candidate_medians),
        "peak_resident_bytes": result.peak_resident_bytes,
    }


def _finite(value: object) -> object:
    """JSON knows no infinity: what is not finite is written as null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return value
