"""Memory over the steps, and what holds it at the peak."""

from __future__ import annotations

from dataclasses import replace

from flatout.report.html import charts
from flatout.report.html.blocks import Block, Cell, Details, Facts, Section, Table, Text
from flatout.report.html.reading import Part, Sources
from flatout.report.html.tables import bytes_cell, figure, heads, stacked
from flatout.units import format_bytes

MOST_ROWS = 50


def memory(sources: Sources) -> Section | None:
    """Of a memory document; else the samples that a run took."""
    blocks: list[Block] = []
    if "memory" in sources:
        doc = sources["memory"]
        use = doc.at("use")
        blocks += [
            *_ranks(doc),
            *_curve(use),
            *_peak(use),
            *_holders(use),
            *_leaks(doc.at("leaks")),
            *_savings(use),
            *_process(doc),
        ]
        blocks += [Text(text=note) for note in doc.texts("notes")]
    elif "run" in sources:
        blocks += _of_run(sources["run"])
    return Section(id="memory", title="Memory", blocks=tuple(blocks)) if blocks else None


def _ranks(doc: Part) -> list[Block]:
    """A row for each process that trained; the blocks below are of one of them."""
    ranks, shown = doc.parts("ranks"), doc.text("shown_rank") or "the script itself"
    if not ranks:
        return []
    rows = []
    for one in ranks:
        use, leaks = one.at("use"), one.at("leaks")
        leaking = ", ".join(leak.text("line") or leak.text("holder") for leak in leaks.parts("leaks"))
        rows.append(
            (
                Cell(text=one.text("name") or "a process", note=one.text("fault")),
                bytes_cell(use.at("peak").number("size_bytes")),
                bytes_cell(use.number("between_steps_bytes")),
                bytes_cell(one.number("peak_resident_bytes")),
                Cell(text=leaking or {"steady": "none"}.get(leaks.text("verdict"), "unknown")),
            )
        )
    caption = f"Memory of each process that trained; what follows is of {shown}"
    sizes = ("peak of tensors", "between steps", "whole process")
    return [Table(caption=caption, heads=heads("process", *sizes, "leaks", numeric=sizes), rows=tuple(rows))]


def _curve(use: Part) -> list[Block]:
    steps = use.parts("steps")
    names = (("peak_bytes", "peak in the step"), ("held_bytes", "held after it"))
    return _drawn(steps, names, use.text("device"), round(use.number("warm_up") or 0))


def _of_run(doc: Part) -> list[Block]:
    names = (("reserved_bytes", "reserved"), ("peak_bytes", "peak"), ("held_bytes", "held after the step"))
    blocks = _drawn(doc.parts("memory"), names, doc.at("observed").text("device"), 0)
    death = doc.at("out_of_memory")
    held = death.by_name("categories")
    blocks += _categories(held, f"Held when it ran out of memory: {format_bytes(sum(held.values()))}")
    rows = tuple(
        (
            Cell(text=one.text("line") or one.text("name"), code=True),
            Cell(text=one.text("name")),
            bytes_cell(one.number("size_bytes")),
        )
        for one in death.parts("holders")
    )
    if rows:
        named = heads("line", "variable", "size", numeric=("size",))
        blocks.append(Table(caption="What held it", heads=named, rows=rows))
    return [*blocks, *_process(doc)]


def _drawn(steps: list[Part], names: tuple[tuple[str, str], ...], device: str, warm_up: int) -> list[Block]:
    curves: list[charts.Curve] = []
    for key, name in names:
        points = [(step.number("step"), step.number(key)) for step in steps]
        known = [(at, size) for at, size in points if at is not None and size is not None and size >= 0]
        if len(known) >= 2:
            curves.append((name, known))
    if not curves:
        return []
    most = max(size for _, points in curves for _, size in points)
    label = f"Memory of tensors over {len(steps)} steps, {format_bytes(most)} at most"
    drawn = figure(
        lambda width: charts.memory_curve(curves, width, label, warm_up),
        f"Memory of tensors on {device or 'the device'}, step by step.",
    )
    rows = [
        (
            Cell(text=f"{step.number('step') or 0:,.0f}"),
            *(bytes_cell(step.number(key)) for key, _ in names if step.number(key) is not None),
        )
        for step in steps[:MOST_ROWS]
    ]
    columns = ("step", *(name for name, _ in curves))
    full = tuple(row for row in rows if len(row) == len(columns))
    more = f"and {len(steps) - MOST_ROWS:,} more steps" if len(steps) > MOST_ROWS else ""
    table = Table(caption="Memory by step", heads=heads(*columns, numeric=columns), rows=full, more=more)
    return [drawn, Details(summary="The curve in figures", blocks=(table,))]


def _peak(use: Part) -> list[Block]:
    peak = use.at("peak")
    size = peak.number("size_bytes")
    if size is None:
        return []
    step = peak.number("step")
    places = [
        ", ".join(filter(None, (f"in step {step:.0f}" if step else "", peak.text("phase")))),
        peak.text("module") and f"of {peak.text('module')}",
        peak.text("line") and f"at {peak.text('line')}",
        peak.text("operation") and f"({peak.text('operation')})",
    ]
    where = " ".join(place for place in places if place)
    return _categories(peak.by_name("categories"), f"At the peak, {format_bytes(size)}{where and ' '}{where}")


def _categories(categories: dict[str, float], caption: str) -> list[Block]:
    shown = [(name, f"hold-{number % 8}", size) for number, (name, size) in enumerate(categories.items()) if size > 0]
    if not shown:
        return []
    said = ", ".join(f"{name} {format_bytes(size)}" for name, _, size in shown)
    return stacked(shown, f"{caption}: {said}", caption, ("kind", "size", "share"), format_bytes)


def _holders(use: Part) -> list[Block]:
    blocks: list[Block] = []
    lines = tuple(
        (
            Cell(text=one.text("line") or "unknown", code=True),
            Cell(text=", ".join(one.texts("categories"))),
            Cell(text=f"{one.number('tensors') or 0:,.0f}"),
            bytes_cell(one.number("size_bytes")),
        )
        for one in use.parts("lines")[:MOST_ROWS]
    )
    if lines:
        named = heads("line", "holds", "tensors", "size", numeric=("tensors", "size"))
        blocks.append(Table(caption="Lines whose tensors were held at the peak", heads=named, rows=lines))
    tensors = tuple(
        (
            Cell(text=f"{_shape(one)} {one.text('dtype')}", code=True),
            Cell(text=one.text("category")),
            Cell(
                text=" ".join(filter(None, (one.text("module"), one.text("line")))) or one.text("operation"), code=True
            ),
            bytes_cell(one.number("size_bytes")),
        )
        for one in use.parts("tensors")[:MOST_ROWS]
    )
    if tensors:
        named = heads("tensor", "kind", "made at", "size", numeric=("size",))
        table = Table(caption="The largest tensors at the peak", heads=named, rows=tensors)
        blocks.append(Details(summary="The largest tensors", blocks=(table,)))
    return blocks


def _shape(tensor: Part) -> str:
    return "×".join(f"{size:.0f}" for size in tensor.numbers("shape")) or "scalar"


def _leaks(leaks: Part) -> list[Block]:
    rows = []
    for one in leaks.parts("leaks"):
        growth, nodes = one.number("bytes_per_step") or 0.0, one.number("graph_nodes_per_step")
        more = f"and {nodes:.3g} autograd graph nodes" if nodes else ""
        rows.append(
            (
                Cell(text=one.text("holder") or "an unnamed object", code=True, note=one.text("type_name")),
                Cell(text=one.text("line") or "not found", code=True, note=one.text("source")),
                Cell(text=f"{format_bytes(growth)} a step", note=more),
            )
        )
    if not rows:
        return []
    named = heads("held by", "grows at", "growth", numeric=("growth",))
    return [Table(caption="Leaks: what grows from step to step", heads=named, rows=tuple(rows))]


def _savings(use: Part) -> list[Block]:
    rows = []
    for one in use.parts("savings"):
        before, after = one.number("peak_before_bytes"), one.number("peak_after_bytes")
        peak = "unknown" if before is None or after is None else f"{format_bytes(before)} → {format_bytes(after)}"
        note = " ".join(filter(None, (one.text("line"), one.text("how"))))
        held = bytes_cell(one.number("held_bytes"))
        if one.text("certainty") == "at most":
            held = replace(held, note="at most")
        rows.append((Cell(text=one.text("measure"), note=note), held, Cell(text=peak)))
    if not rows:
        return []
    named = heads("measure", "held less", "peak", numeric=("held less", "peak"))
    return [Table(caption="What would save memory", heads=named, rows=tuple(rows))]


def _process(doc: Part) -> list[Block]:
    size = doc.number("peak_resident_bytes")
    if size is None:
        return []
    return [Facts(rows=(("the whole process", format_bytes(size), "at most, Python and libraries included"),))]
