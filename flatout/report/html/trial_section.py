"""What a tune tried, with the interval of each speedup, and what it did not try."""

from __future__ import annotations

from flatout.report.html import charts
from flatout.report.html.blocks import Block, Cell, Details, Facts, Head, Section, Table
from flatout.report.html.reading import Part
from flatout.report.html.verdicts import Sources
from flatout.units import format_bytes, format_seconds

MOST_ROWS = 200


def trials(sources: Sources) -> Section | None:
    if "tune" not in sources:
        return None
    doc = sources["tune"]
    tried = doc.parts("trials")[:MOST_ROWS]
    blocks: list[Block] = []
    if tried:
        blocks.append(_table(tried))
    if skipped := doc.parts("not_tried"):
        blocks.append(_not_tried(skipped))
    if devices := doc.at("devices").parts("trials"):
        blocks.append(_devices(devices[:MOST_ROWS]))
    budget, seconds = doc.number("budget_seconds"), doc.number("seconds")
    if budget and seconds:
        blocks.append(
            Facts(rows=(("time taken", format_seconds(seconds), f"of a budget of {format_seconds(budget)}"),))
        )
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
    heads = (
        Head(text="change"),
        Head(text="speed", numeric=True),
        Head(text="95 % interval", chart=charts.interval_axis(scale)),
        Head(text="outcome"),
    )
    return Table(
        caption="In the order of trial: a filled diamond was kept, a ring was not, an arrow is off the axis",
        heads=heads,
        rows=tuple(rows),
    )


def _devices(tried: list[Part]) -> Table:
    """Predicted beside measured."""
    rows = []
    for trial in tried:
        told, found = trial.at("predicted"), trial.at("comparison")
        ratio, low, high = (found.number(key) for key in ("ratio", "low", "high"))
        least, most = told.number("least"), told.number("most")
        interval = f"{low:.2f} to {high:.2f}" if low and high else ""
        rows.append(
            (
                Cell(text=f"{trial.number('devices') or 0:.0f} devices"),
                Cell(text="not timed" if ratio is None else f"×{ratio:.2f}", note=interval),
                Cell(text=f"×{least:.2f} to ×{most:.2f}" if least and most else "", note=told.text("reason")),
                Cell(text=trial.text("outcome"), note=" · ".join(filter(None, [trial.text("reason"), _times(trial)]))),
            )
        )
    heads = (
        Head(text="devices"),
        Head(text="speed", numeric=True),
        Head(text="predicted"),
        Head(text="outcome"),
    )
    return Table(caption="The same script on several devices, compared with one", heads=heads, rows=tuple(rows))


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
    table = Table(caption="Not tried", heads=(Head(text="changes"), Head(text="why not")), rows=rows[:MOST_ROWS])
    return Details(summary=f"{len(skipped)} changes were not tried", blocks=(table,))
