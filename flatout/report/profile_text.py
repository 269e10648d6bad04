"""Where the time of a step went, as a screen for people and as a document for programs."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flatout.diagnose.finding import Finding
from flatout.machine.description import Machine
from flatout.profiling.operator_classes import PRODUCTS
from flatout.profiling.profile import (
    GroupBy,
    KernelRow,
    ModuleRow,
    OperatorRow,
    Profile,
    RooflineRow,
    SortBy,
    StepParts,
)
from flatout.report.document import document
from flatout.report.rank_text import profiled_rank_rows, rank_fields
from flatout.report.step_text import percent
from flatout.script.profile_trial import ProfileWatched
from flatout.terminal import printable
from flatout.units import format_bytes, format_number, format_rate, format_seconds, labelled

KIND = "profile"
LINES_SHOWN, MODULES_SHOWN, OPERATORS_SHOWN, ROOFLINE_SHOWN, KERNELS_SHOWN, NOTES_SHOWN = 5, 6, 8, 5, 3, 4
LEAST_SHARE = 0.01
LABEL_WIDTH = 11
LINE_WIDTH = 118
OVERHEAD_IS_LARGE = 0.25
PARTS = {
    "data": "waiting for the loader",
    "copies": "copies between host and GPU",
    "forward": "the forward pass",
    "backward": "the backward pass",
    "optimizer": "the optimizer's update",
    "communication": "communication between ranks",
    "evaluation": "modules without gradients",
    "idle": "time in which the GPU has no work",
    "other": "outside of modules, backward pass and optimizer",
}


@dataclass(frozen=True, kw_only=True)
class ScriptProfile:
    """What `flatout profile` found of a script."""

    watched: ProfileWatched
    profile: Profile | None
    """With ceilings, as far as they are known."""
    machine: Machine
    findings: tuple[Finding, ...] | None = None
    """None: no checks were made."""


def profile_document(found: ScriptProfile, *, include_private: bool = False) -> dict[str, object]:
    """Seconds, bytes and FLOPs per step; what is unknown is null, and profile.reasons says why."""
    watched = found.watched
    payload: dict[str, object] = {
        "script": {"name": watched.target.name, "arguments": list(watched.target.arguments), "status": watched.status},
        "steps": watched.steps,
        "step_kind": watched.step_kind,
        "profile": found.profile.to_json() if found.profile is not None else None,
        "observed": watched.observed.to_json() if watched.observed is not None else None,
        "behaviour": watched.behaviour.to_json() if watched.behaviour is not None else None,
        **rank_fields(watched.ranks, watched.rank_notes),
        "findings": [one.to_json() for one in found.findings] if found.findings is not None else None,
        "machine": found.machine.to_json(),
    }
    return document(KIND, payload, include_private=include_private)


def script_text(
    found: ScriptProfile,
    *,
    by: GroupBy = "name",
    sort: SortBy = "time",
    files: Sequence[tuple[str, Path]] = (),
    width: int | None = LINE_WIDTH,
) -> str:
    """One screen. files: (what, where) that were written. width: where rows are cut; None: nowhere, as in a file."""
    watched = found.watched
    rows = [("script", f"{shlex.join(watched.target.command)} · {_steps(found)}")]
    if found.profile is not None:
        rows += _rows(found.profile, by, sort)
    elif not watched.steps and not watched.status:
        rows.append(("note", "processes that it starts are followed too, if they are Python's and make an optimizer"))
        rows.append(("", "a function can be profiled by itself: flatout.profile(lambda: step(batch))"))
    rows += profiled_rank_rows(watched.ranks, watched.rank_notes)
    rows += labelled("written", [f"{what}: {path} ({_size(path)})" for what, path in files])
    for one in found.findings or ():
        rows += labelled(one.severity, finding_texts(one))
    if found.profile is not None:
        rows += labelled("next", _next(found, found.profile, files))
    return rows_text(rows, width)


def finding_texts(one: Finding) -> list[str]:
    """Lines for people: title, evidence, where, what to do."""
    cost = f" [{format_seconds(one.cost_seconds)} a step]" if one.cost_seconds is not None else ""
    texts = [f"{one.title}{cost} ({one.name}, {one.confidence})", *_wrapped(one.evidence)]
    texts += [f"  {file}:{number}  {text}" for file, number, text in one.lines[:3]]
    texts += _wrapped(f"do: {one.remedy}")
    return [*texts, f"next: {one.next_command}"] if one.next_command else texts


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, LINE_WIDTH - 2)


def profile_text(profile: Profile, *, by: GroupBy = "name", sort: SortBy = "time") -> str:
    """The same of a profile alone, as `flatout.profile` returns it."""
    step = profile.best_step_seconds
    head = f"{profile.name} · {format_seconds(step)} a call" if step is not None else profile.name
    return rows_text([("profile", head), *_rows(profile, by, sort)])


def verdict(profile: Profile) -> str:
    """What takes most of a step, in one sentence."""
    step, parts = profile.best_step_seconds, profile.parts
    if step is None or parts is None:
        return f"unknown, because {_because(profile, 'parts').removeprefix('unknown, because ')}"
    shares = {
        "waits for its loader": parts.data / step,
        "leaves the GPU without work": parts.idle / step,
        "is communication between ranks": parts.communication / step,
        "is copies between host and GPU": parts.copies / step,
    }
    worst = max(shares, key=lambda name: shares[name])
    products = [row for row in profile.roofline if row.operator_class in PRODUCTS]
    seconds = sum(row.seconds for row in products)
    share = min(1.0, seconds / (profile.profiled_step_seconds or step))
    of_products = _products(profile, products, share)
    if shares[worst] > max(0.3, share):
        return f"{percent(shares[worst])} of a step of {format_seconds(step)} {worst}; {of_products}"
    if not profile.operators:
        return f"a step takes {format_seconds(step)}; operators are {_because(profile, 'operators')}"
    if share >= 0.3:
        return f"{percent(share)} of a step of {format_seconds(step)} {of_products.partition(' ')[2]}"
    profiled = profile.profiled_step_seconds or step
    outside = 1 - (parts.data + parts.idle) / step - profile.operator_seconds / profiled
    if outside > 0.4 and profile.device == "cpu" and (profile.overhead or 0.0) <= OVERHEAD_IS_LARGE:
        return f"{percent(outside)} of a step of {format_seconds(step)} is outside of torch's operators; {of_products}"
    largest = max(parts.to_json().items(), key=lambda item: item[1])
    return f"{percent(largest[1] / step)} of a step of {format_seconds(step)} is {PARTS[largest[0]]}; {of_products}"


def _products(profile: Profile, products: Sequence[RooflineRow], share: float) -> str:
    """'62% is matrix products at 41% of this processor's measured fp32 rate'."""
    if not profile.operators:
        return "operators are unknown"
    if not products:
        return "none of it is matrix products"
    main = max(products, key=lambda row: row.seconds)
    text = f"{percent(share)} is matrix products"
    known = [row for row in products if row.dtype == main.dtype and row.flops and row.attained_flops_per_second]
    flops = sum(row.flops or 0.0 for row in known)
    seconds = sum((row.flops or 0.0) / (row.attained_flops_per_second or 1.0) for row in known)
    ceiling = next((row.ceiling for row in known if row.bound == "compute" and row.ceiling), None)
    device = "processor" if profile.device == "cpu" else "GPU"
    if not flops or not seconds:
        return text
    if ceiling is None:
        return f"{text} at {format_rate(flops / seconds, 'FLOP/s')}"
    return f"{text} at {percent(flops / seconds / ceiling)} of this {device}'s measured {main.dtype} rate"


def _rows(profile: Profile, by: GroupBy, sort: SortBy) -> list[tuple[str, str]]:
    rows = [("verdict", verdict(profile))]
    step = profile.best_step_seconds
    if profile.parts is not None and step is not None:
        rows += labelled("parts", _parts(profile, profile.parts, step))
    rows += labelled("lines", _lines(profile))
    rows += labelled("modules", _modules(profile))
    rows += labelled("operators", _operators(profile, by, sort))
    rows += labelled("kernels", [_kernel(one) for one in profile.kernels[:KERNELS_SHOWN]])
    rows += labelled("ceilings", _ceilings(profile))
    rows += labelled("units", _units(profile))
    rows += labelled("idle", [f"{format_seconds(c.seconds)}: {c.cause}: {c.evidence}" for c in profile.idle_causes])
    rows += labelled("waits", _waits(profile))
    rows += labelled("measured", _measured(profile))
    rows += labelled("note", list(profile.notes)[:NOTES_SHOWN])
    return rows


def _steps(found: ScriptProfile) -> str:
    watched, profile = found.watched, found.profile
    if profile is None:
        counted = f"{watched.steps} step{'s' if watched.steps != 1 else ''}, too few to profile"
        said = counted if watched.steps else "no training step found"
        return said if watched.status in (None, 0) else f"{said}; the script exited with code {watched.status}"
    parts = [f"{profile.steps} steps profiled" if profile.steps != 1 else "1 step profiled"]
    parts.append(f"{profile.timed_steps} timed without the profiler")
    rates = [
        f"{format_number(rate)} {what}/s"
        for what, rate in (("samples", profile.samples_per_second), ("tokens", profile.tokens_per_second))
        if rate is not None
    ]
    if watched.status is not None:
        parts.append(f"the script exited on its own with code {watched.status}")
    return " · ".join([", ".join(parts), *rates])


def _parts(profile: Profile, parts: StepParts, step: float) -> list[str]:
    shown = {name: seconds for name, seconds in parts.to_json().items() if seconds > 0.005 * step}
    scale, unit = (1e3, "ms") if step < 1 else (1.0, "s")
    inside = " + ".join(f"{name} {seconds * scale:.3g}" for name, seconds in shown.items())
    texts = [f"{format_seconds(step)} = {inside or 'nothing'} {unit}"]
    on_top = profile.evaluation_seconds or 0.0
    if on_top > 0.005 * step:
        texts.append(f"and {format_seconds(on_top)} a step of modules without gradients")
    if profile.reasons.get("parts"):
        texts.append(profile.reasons["parts"])
    return texts


def _lines(profile: Profile) -> list[str]:
    if not profile.lines:
        return [_because(profile, "lines")] if profile.operators else []
    shown = [row for row in profile.lines if row.share >= LEAST_SHARE][:LINES_SHOWN]
    width = max((len(row.place) for row in shown), default=0)
    return [f"{percent(row.share):>6}  {row.place:<{width}}  {row.text}" for row in shown]


def _modules(profile: Profile) -> list[str]:
    total = profile.operator_seconds or 1.0
    shown = sorted(profile.modules, key=lambda row: -row.seconds)
    shown = [row for row in shown if row.seconds >= LEAST_SHARE * total and row.depth <= 8][:MODULES_SHOWN]
    order = {row.path: number for number, row in enumerate(profile.modules)}
    return [_module(row, total, order) for row in sorted(shown, key=lambda row: order[row.path])]


def _module(row: ModuleRow, total: float, paths: Container[str]) -> str:
    """Named relative to the module that calls it: a list of modules between them is called by nobody."""
    above = row.path.rpartition(".")[0]
    while above and above not in paths:
        above = above.rpartition(".")[0]
    name = row.path[len(above) + 1 :] if above else row.path
    backward = f" + {format_seconds(row.backward_seconds)} backward" if row.backward_seconds is not None else ""
    return (
        f"{percent(row.seconds / total):>6}  {'  ' * row.depth}{name} ({row.kind})  "
        f"{format_seconds(row.forward_seconds)} forward{backward}"
    )


def _operators(profile: Profile, by: GroupBy, sort: SortBy) -> list[str]:
    if not profile.operators:
        return [_because(profile, "operators")]
    total = profile.operator_seconds or 1.0
    shown = profile.operators_by(by, sort)[:OPERATORS_SHOWN]
    return [_operator(row, total, by) for row in shown if row.seconds >= 0.002 * total or sort != "time"]


def _operator(row: OperatorRow, total: float, by: GroupBy) -> str:
    name = row.name.removeprefix("aten::")
    if by == "line":
        name = row.line or "(no line)"
    elif by == "module":
        name = row.module or "(no module)"
    elif by == "shape":
        name = " ".join(part for part in (name, row.shapes, row.dtype) if part)
    elif by in ("phase", "dtype", "class"):
        name = {"phase": row.phase, "dtype": row.dtype or "(none)", "class": row.operator_class}[by]
    parts = [
        f"{percent(row.seconds / total):>6}  {name:<24}",
        f"{format_number(row.calls)} calls",
        format_seconds(row.seconds),
    ]
    if row.flops and row.seconds:
        parts.append(format_rate(row.flops / row.seconds, "FLOP/s"))
    elif row.bytes and row.seconds:
        parts.append(format_rate(row.bytes / row.seconds, "B/s"))
    return "  ".join(parts)


def _waits(profile: Profile) -> list[str]:
    """Where the host waits for the GPU, which costs nothing while the GPU has work: see 'idle'."""
    return [
        f"{format_seconds(one.seconds):>8}  {format_number(one.calls)} x "
        f"{one.operator.removeprefix('aten::') or 'synchronize'}  {one.line or 'line unknown'}"
        for one in profile.waits[:KERNELS_SHOWN]
    ]


def _kernel(row: KernelRow) -> str:
    size = f", {format_rate(row.bytes / row.seconds, 'B/s')}" if row.bytes and row.seconds else ""
    calls = f"{format_number(row.calls)} x {row.name[:60]}"
    return f"{format_seconds(row.seconds):>8}  {calls} ({row.operator or row.kind}{size})"


def _ceilings(profile: Profile) -> list[str]:
    total = profile.operator_seconds or 1.0
    shown = [
        row for row in profile.roofline if row.seconds >= 2 * LEAST_SHARE * total and row.operator_class != "other"
    ]
    texts = [_ceiling(row) for row in shown[:ROOFLINE_SHOWN] if row.share_of_ceiling is not None]
    reasons = dict.fromkeys(row.reason for row in shown if row.share_of_ceiling is None and row.reason)
    return texts or list(reasons)[:1]


def _ceiling(row: RooflineRow) -> str:
    share = row.share_of_ceiling or 0.0
    rate = row.attained_flops_per_second if row.bound == "compute" else row.attained_bytes_per_second
    unit = "FLOP/s" if row.bound == "compute" else "B/s"
    reached = f"{format_rate(rate or 0.0, unit)} of {format_rate(row.ceiling or 0.0, unit)} ({row.ceiling_name})"
    note, name = f"; {row.reason}" if row.reason else "", f"{row.operator_class} {row.dtype}".strip()
    return f"{percent(row.share):>6} of operators  {name:<16}  {percent(share)}: {reached}{note}"


def _units(profile: Profile) -> list[str]:
    units = profile.matrix_units
    if units is None:
        return []
    if units.share is None:
        return [f"share of products on matrix units: unknown, because {units.reason}"]
    texts = [f"{percent(units.share)} of the time of products on {units.unit}"]
    texts += [f"{percent(seconds / units.product_seconds)} not: {why}" for why, seconds in units.rest[:2]]
    return texts


def _measured(profile: Profile) -> list[str]:
    texts = []
    if profile.overhead is not None and profile.profiled_step_seconds is not None:
        plain = f"{format_seconds(profile.step_seconds or 0.0)} without"
        texts.append(
            f"a step took {format_seconds(profile.profiled_step_seconds)} under the profiler, {plain} "
            f"({profile.overhead:+.0%}); shares are of the profiled operators"
        )
        if profile.overhead > OVERHEAD_IS_LARGE:
            texts.append("the profiler slows steps of many small operators down most: their share is overstated")
    elif profile.profiled_step_seconds is not None:
        texts.append(f"{format_seconds(profile.profiled_step_seconds)} a step, under the profiler alone")
    if profile.samples_per_step is None and profile.reasons.get("samples_per_step"):
        texts.append(f"samples/s: {profile.reasons['samples_per_step']}")
    return texts


def _next(found: ScriptProfile, profile: Profile, files: Sequence[tuple[str, Path]]) -> list[str]:
    watched = found.watched
    command = shlex.join(watched.target.command)
    devices = "" if watched.devices is None else f"--devices {watched.devices} "
    texts = [f"flatout run {devices}{command}" if watched.ranks else f"flatout tune {command}"]
    if not any(what == "trace" for what, _ in files):
        texts.append(f"flatout profile {devices}--trace trace.json.gz {command}     (open it in ui.perfetto.dev)")
    if any("flatout check --measure" in row.reason for row in profile.roofline):
        texts.append("flatout check --measure")
    return texts


def _because(profile: Profile, name: str) -> str:
    return profile.reasons.get(name) or "unknown"


def _size(path: Path) -> str:
    """Of a file, or of the files in a folder."""
    try:
        files = [path] if path.is_file() else list(path.iterdir())
        return format_bytes(sum(one.stat().st_size for one in files))
    except OSError:
        return "unknown size"


def rows_text(rows: Iterable[tuple[str, str]], width: int | None = LINE_WIDTH) -> str:
    """Labels beside printable texts, each row cut to the width of the screen; None: not cut."""
    return "\n".join(f"{label:<{LABEL_WIDTH}}{_cut(printable(text), width)}" for label, text in rows)


def _cut(text: str, width: int | None) -> str:
    return text if width is None or len(text) <= width else text[: width - 1] + "…"
