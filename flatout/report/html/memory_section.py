"""Memory over the steps, and what holds it at the peak."""

from __future__ import annotations

from flatout.report.html import charts
from flatout.report.html.blocks import Block, Cell, Details, Facts, Head, Section, Table, Text
from flatout.report.html.charts import Curve
from flatout.report.html.reading import Part
from flatout.report.html.step_sections import figure
from flatout.report.html.verdicts import Sources
from flatout.report.step_text import percent
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
    heads = ("process", "peak of tensors", "between steps", "whole process", "leaks")
    rows = []
    for one in ranks:
        use, leaks = one.at("use"), one.at("leaks")
        leaking = ", ".join(leak.text("line") or leak.text("holder") for leak in leaks.parts("leaks"))
        rows.append(
            (
                Cell(text=one.text("name") or "a process", note=one.text("fault")),
                _size(use.at("peak")),
                _size(use, "between_steps_bytes"),
                _size(one, "peak_resident_bytes"),
                Cell(text=leaking or {"steady": "none"}.get(leaks.text("verdict"), "unknown")),
            )
        )
    table = Table(
        caption=f"Memory of each process that trained; what follows is of {shown}",
        heads=tuple(Head(text=text, numeric=0 < number < 4) for number, text in enumerate(heads)),
        rows=tuple(rows),
    )
    return [table]


def _curve(use: Part) -> list[Block]:
    steps = use.parts("steps")
    names = (("peak_bytes", "peak in the step"), ("held_bytes", "held after it"))
    return _drawn(steps, names, use.text("device"), round(use.number("warm_up") or 0))


def _of_run(doc: Part) -> list[Block]:
    names = (("reserved_bytes", "reserved"), ("peak_bytes", "peak"), ("held_bytes", "held after the step"))
    blocks = _drawn(doc.parts("memory"), names, doc.at("observed").text("device"), 0)
    death, rows = doc.at("out_of_memory"), []
    if death:
        held = death.by_name("categories")
        blocks += _categories(held, f"Held when it ran out of memory: {format_bytes(sum(held.values()))}")
        rows = [
            (Cell(text=one.text("line") or one.text("name"), code=True), Cell(text=one.text("name")), _size(one))
            for one in death.parts("holders")
        ]
    if rows:
        heads = (Head(text="line"), Head(text="variable"), Head(text="size", numeric=True))
        blocks.append(Table(caption="What held it", heads=heads, rows=tuple(rows)))
    return [*blocks, *_process(doc)]


def _drawn(steps: list[Part], names: tuple[tuple[str, str], ...], device: str, warm_up: int) -> list[Block]:
    curves = []
    for key, name in names:
        points = [(step.number("step"), step.number(key)) for step in steps]
        known = [(at, size) for at, size in points if at is not None and size is not None and size >= 0]
        if len(known) >= 2:
            curves.append(Curve(name=name, points=known))
    if not curves:
        return []
    most = max(size for curve in curves for _, size in curve.points)
    label = f"Memory of tensors over {len(steps)} steps, {format_bytes(most)} at most"
    drawn = figure(
        lambda width: charts.memory_curve(curves, width, label, warm_up),
        f"Memory of tensors on {device or 'the device'}, step by step.",
    )
    rows = [
        (
            Cell(text=f"{step.number('step') or 0:,.0f}"),
            *(_size(step, key) for key, _ in names if step.number(key) is not None),
        )
        for step in steps[:MOST_ROWS]
    ]
    heads = (Head(text="step", numeric=True), *(Head(text=curve.name, numeric=True) for curve in curves))
    full = tuple(row for row in rows if len(row) == len(heads))
    more = f"and {len(steps) - MOST_ROWS:,} more steps" if len(steps) > MOST_ROWS else ""
    table = Table(caption="Memory by step", heads=heads, rows=full, more=more)
    return [drawn, Details(summary="The curve in figures", blocks=(table,))]


def _size(part: Part, key: str = "size_bytes") -> Cell:
    size = part.number(key)
    return Cell(text="unknown" if size is None else format_bytes(size))


def _peak(use: Part) -> list[Block]:
    peak = use.at("peak")
    size = peak.number("size_bytes")
    if size is None:
        return []
    step = peak.number("step")
    places = [
        f"in step {step:.0f}" if step else "",
        peak.text("phase"),
        peak.text("module") and f"of {peak.text('module')}",
        peak.text("line") and f"at {peak.text('line')}",
        peak.text("operation") and f"({peak.text('operation')})",
    ]
    where = " ".join(place for place in places if place)
    return _categories(peak.by_name("categories"), f"At the peak, {format_bytes(size)}{where and ' '}{where}")


def _categories(categories: dict[str, float], caption: str) -> list[Block]:
    shown = [(name, size) for name, size in categories.items() if size > 0]
    total = sum(size for _, size in shown)
    if not total:
        return []
    said = ", ".join(f"{name} {format_bytes(size)}" for name, size in shown)
    places = {name: f"hold-{number % 8}" for number, name in enumerate(categories)}
    bar = charts.stacked_bar([(places[name], size) for name, size in shown], f"{caption}: {said}")
    rows = tuple(
        (
            Cell(text=name, swatch=places[name]),
            Cell(text=format_bytes(size)),
            Cell(text=percent(size / total), bar=charts.share_bar(size / total)),
        )
        for name, size in shown
    )
    heads = (Head(text="kind"), Head(text="size", numeric=True), Head(text="share", numeric=True))
    drawn = figure(lambda width: bar, "")
    return [drawn, Table(caption=caption, heads=heads, rows=rows)]


def _holders(use: Part) -> list[Block]:
    lines = [
        (
            Cell(text=one.text("line") or "unknown", code=True),
            Cell(text=", ".join(one.texts("categories"))),
            Cell(text=f"{one.number('tensors') or 0:,.0f}"),
            _size(one),
        )
        for one in use.parts("lines")[:MOST_ROWS]
    ]
    heads = (Head(text="line"), Head(text="holds"), Head(text="tensors", numeric=True), Head(text="size", numeric=True))
    blocks: list[Block] = []
    if lines:
        blocks.append(Table(caption="Lines whose tensors were held at the peak", heads=heads, rows=tuple(lines)))
    tensors = [
        (
            Cell(text=f"{_shape(one)} {one.text('dtype')}", code=True),
            Cell(text=one.text("category")),
            Cell(
                text=" ".join(filter(None, (one.text("module"), one.text("line")))) or one.text("operation"), code=True
            ),
            _size(one),
        )
        for one in use.parts("tensors")[:MOST_ROWS]
    ]
    if tensors:
        heads = (Head(text="tensor"), Head(text="kind"), Head(text="made at"), Head(text="size", numeric=True))
        table = Table(caption="The largest tensors at the peak", heads=heads, rows=tuple(tensors))
        blocks.append(Details(summary="The largest tensors", blocks=(table,)))
    return blocks


def _shape(tensor: Part) -> str:
    return "×".join(f"{size:.0f}" for size in tensor.numbers("shape")) or "scalar"


def _leaks(leaks: Part) -> list[Block]:
    rows = []
    for one in leaks.parts("leaks"):
        growth = one.number("bytes_per_step") or 0.0
        nodes = one.number("graph_nodes_per_step")
        more = f"and {nodes:.3g} autograd graph nodes" if nodes else ""
        holder = one.text("holder") or "an unnamed object"
        rows.append(
            (
                Cell(text=holder, code=True, note=one.text("type_name")),
                Cell(text=one.text("line") or "not found", code=True, note=one.text("source")),
                Cell(text=f"{format_bytes(growth)} a step", note=more),
            )
        )
    if not rows:
        return []
    heads = (Head(text="held by"), Head(text="grows at"), Head(text="growth", numeric=True))
    return [Table(caption="Leaks: what grows from step to step", heads=heads, rows=tuple(rows))]


def _savings(use: Part) -> list[Block]:
    rows = []
    for one in use.parts("savings"):
        before, after = one.number("peak_before_bytes"), one.number("peak_after_bytes")
        peak = "unknown" if before is None or after is None else f"{format_bytes(before)} → {format_bytes(after)}"
        note = " ".join(filter(None, (one.text("line"), one.text("how"))))
        held = "unknown" if one.number("held_bytes") is None else format_bytes(one.number("held_bytes") or 0.0)
        rows.append((Cell(text=one.text("measure"), note=note), Cell(text=held), Cell(text=peak)))
    if not rows:
        return []
    heads = (Head(text="measure"), Head(text="held less", numeric=True), Head(text="peak", numeric=True))
    return [Table(caption="What would save memory", heads=heads, rows=tuple(rows))]


def _process(doc: Part) -> list[Block]:
    size = doc.number("peak_resident_bytes")
    if size is None:
        return []
    return [Facts(rows=(("the whole process", format_bytes(size), "at most, Python and libraries included"),))]
