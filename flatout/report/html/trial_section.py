"""What a tune tried, with the interval of each speedup, and what it did not try; which parallel strategies a choice
tried, predicted beside measured."""

from __future__ import annotations

from flatout.report.html import charts
from flatout.report.html.blocks import Block, Cell, Details, Facts, Head, Section, Table
from flatout.report.html.reading import Part, Sources
from flatout.report.html.tables import heads, speed_cell
from flatout.units import format_bytes, format_seconds

MOST_ROWS = 200


def trials(sources: Sources) -> Section | None:
    doc = sources["tune"]
    tried = doc.parts("trials")[:MOST_ROWS]
    blocks: list[Block] = []
    if tried:
        blocks.append(_table(tried))
    if skipped := doc.parts("not_tried"):
        blocks.append(_not_tried(skipped))
    if devices := doc.at("devices").parts("trials"):
        blocks.append(_devices(devices[:MOST_ROWS]))
    if taken := _time_taken(doc):
        blocks.append(Facts(rows=tuple(taken)))
    return Section(id="trials", title="What was tried", blocks=tuple(blocks)) if blocks else None


def _table(tried: list[Part]) -> Table:
    bounds = []
    for trial in tried:
        comparison = trial.at("comparison")
        found = [comparison.number(key) for key in ("ratio", "low", "high")]
        bounds += [value for value in found if value is not None and value > 0]
    scale = charts.interval_scale(bounds)
    rows = []
    for trial in tried:
        comparison = trial.at("comparison")
        ratio, low, high = (comparison.number(key) for key in ("ratio", "low", "high"))
        outcome = trial.text("outcome")
        speed, drawn = Cell(text="not timed"), None
        if ratio is not None and ratio > 0:
            if low is None or high is None or not 0 < low <= high:
                low = high = None
            interval = "no interval" if low is None or high is None else f"{low:.2f} to {high:.2f}"
            speed = Cell(text=f"×{ratio:.2f}", note=interval)
            drawn = charts.interval(scale, ratio, low, high, outcome)
        notes = [trial.text("reason"), *trial.texts("notes"), _times(trial), _peaks(trial)]
        rows.append(
            (
                Cell(text=trial.text("label"), note=trial.text("exactness")),
                speed,
                Cell(text="", chart=drawn),
                Cell(text=outcome, note=" · ".join(note for note in notes if note and note != outcome)),
            )
        )
    axis = Head(text="95 % interval", chart=charts.interval_axis(scale))
    return Table(
        caption="In the order of trial: a filled diamond was kept, a ring was not, an arrow is off the axis",
        heads=(*heads("change", "speed", numeric=("speed",)), axis, *heads("outcome")),
        rows=tuple(rows),
    )


def _devices(tried: list[Part]) -> Table:
    """Predicted beside measured."""
    rows = []
    for trial in tried:
        told = trial.at("predicted")
        least, most = told.number("least"), told.number("most")
        rows.append(
            (
                Cell(text=f"{trial.number('devices') or 0:.0f} devices"),
                speed_cell(trial.at("comparison")),
                Cell(text=f"×{least:.2f} to ×{most:.2f}" if least and most else "", note=told.text("reason")),
                Cell(text=trial.text("outcome"), note=" · ".join(filter(None, [trial.text("reason"), _times(trial)]))),
            )
        )
    named = heads("devices", "speed", "predicted", "outcome", numeric=("speed",))
    return Table(caption="The same script on several devices, compared with one", heads=named, rows=tuple(rows))


def _times(trial: Part) -> str:
    before, after = trial.number("baseline_seconds"), trial.number("candidate_seconds")
    return f"{format_seconds(before)} → {format_seconds(after)}" if before and after else ""


def _peaks(trial: Part) -> str:
    before, after = trial.number("baseline_peak_bytes"), trial.number("candidate_peak_bytes")
    return f"peak {format_bytes(before)} → {format_bytes(after)}" if before and after else ""


def _not_tried(skipped: list[Part]) -> Details:
    """By reason, so that those for a GPU take one row on a machine without one."""
    by_reason: dict[str, list[str]] = {}
    for one in skipped:
        by_reason.setdefault(one.text("reason"), []).append(one.text("label"))
    rows = tuple((Cell(text=", ".join(labels)), Cell(text=reason)) for reason, labels in by_reason.items())
    table = Table(caption="Not tried", heads=heads("changes", "why not"), rows=rows[:MOST_ROWS])
    return Details(summary=f"{len(skipped)} changes were not tried", blocks=(table,))


def _time_taken(doc: Part) -> list[tuple[str, str, str]]:
    budget, seconds = doc.number("budget_seconds"), doc.number("seconds")
    if not budget or not seconds:
        return []
    return [("time taken", format_seconds(seconds), f"of a budget of {format_seconds(budget)}")]


# parallel strategies


def strategies(sources: Sources) -> Section | None:
    doc = sources["strategies"]
    if not doc:
        return None
    memory = doc.at("facts").at("memory")
    numeric = ("a step", "speed", "memory of a rank")
    table = Table(
        caption=f"On {doc.number('ranks') or 0:.0f} ranks, which share every batch, compared with one process",
        heads=heads("strategy", "a step", "speed", "predicted", "memory of a rank", "outcome", numeric=numeric),
        rows=(_alone(doc, memory), *(_strategy(one, memory) for one in doc.parts("trials"))),
    )
    facts = []
    if exchange := doc.number("exchange_seconds"):
        facts.append(("an all_reduce of all gradients", format_seconds(exchange), "measured between these ranks"))
    if limit := doc.number("limit_bytes"):
        facts.append(("a rank may take", format_bytes(limit), ""))
    facts += _time_taken(doc)
    blocks: tuple[Block, ...] = (table, Facts(rows=tuple(facts))) if facts else (table,)
    return Section(id="strategies", title="Parallel strategies", blocks=blocks)


def _alone(doc: Part, memory: Part) -> tuple[Cell, ...]:
    step = doc.at("facts").number("step_seconds")
    outcome = Cell(text="" if step is not None else "it does not fit")
    return (
        Cell(text="one process"),
        _timed(step),
        Cell(text=""),
        Cell(text=""),
        _forecast(memory, "one process"),
        outcome,
    )


def _strategy(one: Part, memory: Part) -> tuple[Cell, ...]:
    told, name, peak = one.at("predicted"), one.text("strategy"), one.number("peak_bytes")
    predicted = told.number("step_seconds")
    return (
        Cell(text=name),
        _timed(one.number("step_seconds")),
        speed_cell(one.at("comparison")),
        Cell(text="" if predicted is None else format_seconds(predicted), note=told.text("reason")),
        _forecast(memory, name) if peak is None else Cell(text=format_bytes(peak), note="measured"),
        Cell(text=one.text("outcome"), note=one.text("reason")),
    )


def _timed(step: float | None) -> Cell:
    return Cell(text="not timed" if step is None else format_seconds(step))


def _forecast(memory: Part, name: str) -> Cell:
    known = memory.at(name)
    size = known.number("bytes")
    if size is None:
        return Cell(text="unknown", note=known.text("reason"))
    return Cell(text=format_bytes(size), note="forecast")
