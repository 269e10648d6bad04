"""Before and after a tune, and where the time of a step goes."""

from __future__ import annotations

from flatout.profiling.profile import evaluation_in_step
from flatout.report.html import charts
from flatout.report.html.blocks import Block, Cell, Code, Details, Facts, Section, Table, Text
from flatout.report.html.reading import Part, Sources
from flatout.report.html.tables import figure, heads, stacked
from flatout.report.html.verdicts import PART_NAMES, proof_line
from flatout.report.step_text import percent
from flatout.report.tune_text import floor_text
from flatout.statistics import iqr, median, quantile
from flatout.units import counted, format_seconds


def before_after(sources: Sources) -> Section | None:
    """Of a tune that kept something."""
    doc = sources["tune"]
    final = doc.at("final")
    before, after = final.number("baseline_seconds"), final.number("candidate_seconds")
    if before is None or after is None:
        return None
    plain, planned = final.numbers("baseline_medians"), final.numbers("candidate_medians")
    label = f"Time of a step: {format_seconds(before)} before, {format_seconds(after)} with the plan"
    bars = [("as the script is", before, plain), ("with the plan", after, planned)]
    blocks: list[Block] = [
        figure(lambda width: charts.before_after(bars, width, label), "Time of a step; each tick is one measurement.")
    ]
    if len(plain) == len(planned) > 2:
        spread = f"{len(plain)} pairs, measured in turns: {label.lower()}"
        caption = "The same, pair by pair: circles before, squares with the plan. Drift of the machine moves both."
        blocks.append(figure(lambda width: charts.paired_timeline(plain, planned, width, spread), caption))
    if kept := doc.texts("kept"):
        blocks.append(Facts(rows=(("changes kept", ", ".join(kept), f"numbers: {doc.text('exactness')}"),)))
    blocks += _proof(doc.at("proof"))
    return Section(id="before-after", title="Before and after", blocks=tuple(blocks))


def _proof(proof: Part) -> list[Block]:
    if not proof:
        return []
    rows = tuple(
        (Cell(text=", ".join(claim.texts("levers"))), Cell(text=claim.text("verdict")), Cell(text=claim.text("reason")))
        for claim in proof.parts("claims")
    )
    blocks: list[Block] = [Text(text=f"Are the numbers still right? {proof_line(proof)}: {proof.text('reason')}")]
    if rows:
        blocks.append(Table(caption="Proof of the numbers", heads=heads("change", "numbers", "evidence"), rows=rows))
    figures = [
        ("largest difference in loss", proof.number("loss_difference"), proof.number("loss_floor")),
        ("largest difference in a gradient", proof.number("gradient_difference"), proof.number("gradient_floor")),
    ]
    facts = tuple(
        (name, f"{value:.1e}" if value else "none", f"relative; the script's own noise is {floor_text(floor)}")
        for name, value, floor in figures
        if value is not None
    )
    if facts:
        blocks.append(Facts(rows=facts))
    return [*blocks, *(Text(text=note) for note in proof.texts("notes"))]


def step(sources: Sources) -> Section | None:
    """Its parts and its course: of the profile if there is one, else of the run, else of the tune."""
    blocks = [*_parts(sources), *_timeline(sources), *_rates(sources), *_outside(sources)]
    return Section(id="step", title="Where the time of a step goes", blocks=tuple(blocks)) if blocks else None


def _parts(sources: Sources) -> list[Block]:
    parts, seconds, of_what = _step_parts(sources)
    inside = seconds is not None and evaluation_in_step(parts, seconds)
    evaluation = 0.0 if inside else parts.pop("evaluation", 0.0)
    shown = [(named, f"part-{name}", parts[name]) for name, named in PART_NAMES.items() if parts.get(name, 0.0) > 0]
    total = sum(size for *_, size in shown)
    if not total:
        return []
    said = ", ".join(f"{named} {percent(size / total)}" for named, _, size in shown)
    caption = f"A step of {format_seconds(seconds or total)}{of_what}"
    blocks = stacked(shown, f"Parts of a step: {said}", caption, ("part", "time", "share"), format_seconds)
    if evaluation > 0:
        blocks.append(Text(text=f"Evaluation takes {format_seconds(evaluation)} a step besides, on average."))
    return blocks


def _step_parts(sources: Sources) -> tuple[dict[str, float], float | None, str]:
    """(seconds by part, of the step, of what)."""
    profile = sources["profile"].at("profile")
    if parts := profile.by_name("parts"):
        return parts, profile.number("step_seconds"), ", from the profile"
    for kind, of_what in (("run", ", on average over the steps that were watched"), ("tune", ", before the tune")):
        seen = sources[kind].at("observed")
        if parts := seen.by_name("breakdown_seconds"):
            return parts, seen.number("step_seconds"), of_what
    return {}, None, ""


def _timeline(sources: Sources) -> list[Block]:
    samples, each = _samples(sources)
    if len(samples) < 2 or min(samples) < 0 or max(samples) <= 0:
        return []
    top = charts.timeline_top(samples)
    beyond = sum(one > top for one in samples)
    what = f"{len(samples)} steps" if each else f"{len(samples)} samples"
    label = (
        f"Time of a step in {what}: median {format_seconds(median(samples))}, "
        f"from {format_seconds(min(samples))} to {format_seconds(max(samples))}"
    )
    caption = "Time of each step" if each else f"Time of a step over the run: {len(samples):,} samples, evenly taken"
    if len(samples) > charts.MOST_POINTS:
        caption += "; the line is the median of neighbours, the band goes from the fastest to the slowest"
    if beyond:
        outside = f"{beyond} step{'s' if beyond > 1 else ''} took longer than the chart shows"
        caption += f". {outside}, {format_seconds(max(samples))} at most"
    rows = tuple(
        (Cell(text=name), Cell(text=format_seconds(value)))
        for name, value in (
            ("fastest", min(samples)),
            ("median", median(samples)),
            ("middle half within", iqr(samples)),
            ("95 % take at most", quantile(samples, 0.95)),
            ("slowest", max(samples)),
        )
    )
    table = Table(caption=f"Of {what}", heads=heads("figure", "time", numeric=("time",)), rows=rows)
    drawn = figure(
        lambda width: charts.step_timeline(samples, width, label, "step" if each else "sample"), caption + "."
    )
    return [drawn, Details(summary="The timeline in figures", blocks=(table,))]


def _samples(sources: Sources) -> tuple[list[float], bool]:
    """(seconds, is there one for each step)."""
    if found := sources["run"].at("measurement").numbers("samples_seconds"):
        steps = sources["run"].number("steps")
        return found, steps is not None and len(found) >= steps - 1  # the first step is not timed
    return sources["profile"].at("profile").numbers("samples_seconds"), True


def _rates(sources: Sources) -> list[Block]:
    rows: list[tuple[str, str, str]] = []
    profile = sources["profile"].at("profile")
    seconds = profile.number("step_seconds")
    for name in ("samples", "tokens"):
        count = profile.number(f"{name}_per_step")
        if count and seconds:
            rows.append((f"{name} a second", f"{count / seconds:,.0f}", f"{count:,.0f} a step"))
    for cause in profile.parts("idle_causes"):
        if idle := cause.number("seconds"):
            rows.append((f"idle: {cause.text('cause')}", format_seconds(idle), cause.text("evidence")))
    share = _ceiling_share(sources)
    if share is not None:
        rows.append(("share of the ceiling", *share))
    return [Facts(rows=tuple(rows))] if rows else []


def _ceiling_share(sources: Sources) -> tuple[str, str] | None:
    """(share, of what), or ('unknown', why)."""
    if "tune" in sources:
        doc = sources["tune"]
        before, after = doc.number("ceiling_share_before"), doc.number("ceiling_share_after")
        if before is None or after is None:
            return "unknown", _why_unknown(doc)
        changed = f"{percent(before)} → {percent(after)}" if doc.texts("kept") else percent(after)
        return changed, f"of the {doc.text('ceiling')}"
    doc = sources["run"]
    if not doc.text("ceiling"):
        return None
    share = doc.number("ceiling_share")
    return ("unknown", _why_unknown(doc)) if share is None else (percent(share), f"of the {doc.text('ceiling')}")


def _why_unknown(doc: Part) -> str:
    return doc.text("ceiling").removeprefix("unknown, because ").removeprefix("unknown: ")


def _outside(sources: Sources) -> list[Block]:
    doc, rows = sources["run"], []
    outside = doc.at("outside_of_steps")
    before, pauses, pause = (outside.number(key) for key in ("before_seconds", "pauses", "pause_seconds"))
    if before:
        rows.append(("until the first step ended", format_seconds(before), ""))
    if pauses and pause:
        between = f"{counted(round(pauses), 'pause')}: evaluation, checkpoints, plots"
        rows.append(("between steps", format_seconds(pause), between))
    death = doc.at("out_of_memory")
    blocks: list[Block] = [Facts(rows=tuple(rows))] if rows else []
    if death:
        blocks += [Code(label="Out of memory", text=death.text("message"))]
        blocks += [Text(text=advice) for advice in death.texts("advice")]
    return blocks
