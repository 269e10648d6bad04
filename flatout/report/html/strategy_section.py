"""Which parallel strategies a choice tried, predicted beside measured, with the memory of a rank."""

from __future__ import annotations

from flatout.report.html.blocks import Block, Cell, Facts, Head, Section, Table
from flatout.report.html.reading import Part
from flatout.report.html.verdicts import Sources
from flatout.units import format_bytes, format_seconds

HEADS = ("strategy", "a step", "speed", "predicted", "memory of a rank", "outcome")
NUMERIC = ("a step", "speed", "memory of a rank")


def strategies(sources: Sources) -> Section | None:
    if "strategies" not in sources:
        return None
    doc = sources["strategies"]
    memory = doc.at("facts").at("memory")
    rows = [_alone(doc, memory), *(_row(one, memory) for one in doc.parts("trials"))]
    table = Table(
        caption=f"On {doc.number('ranks') or 0:.0f} ranks, which share every batch, compared with one process",
        heads=tuple(Head(text=text, numeric=text in NUMERIC) for text in HEADS),
        rows=tuple(rows),
    )
    blocks: list[Block] = [table]
    facts = []
    if exchange := doc.number("exchange_seconds"):
        facts.append(("an all_reduce of all gradients", format_seconds(exchange), "measured between these ranks"))
    if limit := doc.number("limit_bytes"):
        facts.append(("a rank may take", format_bytes(limit), ""))
    budget, seconds = doc.number("budget_seconds"), doc.number("seconds")
    if budget and seconds:
        facts.append(("time taken", format_seconds(seconds), f"of a budget of {format_seconds(budget)}"))
    if facts:
        blocks.append(Facts(rows=tuple(facts)))
    return Section(id="strategies", title="Parallel strategies", blocks=tuple(blocks))


def _alone(doc: Part, memory: Part) -> tuple[Cell, ...]:
    step = doc.at("facts").number("step_seconds")
    return (
        Cell(text="one process"),
        Cell(text="not timed" if step is None else format_seconds(step)),
        Cell(text=""),
        Cell(text=""),
        _forecast(memory.at("one process")),
        Cell(text="" if step is not None else "it does not fit"),
    )


def _row(one: Part, memory: Part) -> tuple[Cell, ...]:
    compared, told = one.at("comparison"), one.at("predicted")
    step, predicted, peak = one.number("step_seconds"), told.number("step_seconds"), one.number("peak_bytes")
    ratio, low, high = (compared.number(key) for key in ("ratio", "low", "high"))
    interval = f"{low:.2f} to {high:.2f}" if low and high else ""
    name = one.text("strategy")
    return (
        Cell(text=name),
        Cell(text="not timed" if step is None else format_seconds(step)),
        Cell(text="not timed" if ratio is None else f"×{ratio:.2f}", note=interval),
        Cell(text="" if predicted is None else format_seconds(predicted), note=told.text("reason")),
        _forecast(memory.at(name)) if peak is None else Cell(text=format_bytes(peak), note="measured"),
        Cell(text=one.text("outcome"), note=one.text("reason")),
    )


def _forecast(known: Part) -> Cell:
    size = known.number("bytes")
    return (
        Cell(text="unknown", note=known.text("reason"))
        if size is None
        else Cell(text=format_bytes(size), note="forecast")
    )
