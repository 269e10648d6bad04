"""Of a profile: operators against the ceilings of this machine, and the lines, modules and operators that take time."""

from __future__ import annotations

from collections.abc import Callable

from flatout.report.html import charts
from flatout.report.html.blocks import Block, Cell, Details, Facts, Section, Table, Text
from flatout.report.html.charts import Work
from flatout.report.html.reading import Part, Sources, clean
from flatout.report.html.tables import figure, heads, seconds_cell, share_cell
from flatout.report.step_text import percent
from flatout.units import format_bytes, format_rate, format_seconds

MOST_ROWS, FIRST_ROWS = 100, 15
NUMERIC = ("calls", "time a step", "waited a step", "share", "forward", "backward", "copied")


def roofline(sources: Sources) -> Section | None:
    """What each class of operators reached, against what this machine was measured to reach."""
    doc = sources["profile"]
    rows = doc.at("profile").parts("roofline")
    if not rows:
        return None
    ceilings = doc.at("machine").at("ceilings")
    products = _products(ceilings)
    rate = _bandwidth(ceilings)
    works = _works(rows)
    blocks: list[Block] = []
    if works and products and rate:
        label = f"Roofline of {len(works)} classes of operators; the table gives their figures"
        caption = (
            "Logarithmic. The lines are what this machine reached when it was measured; a mark on a line cannot be "
            "faster. Circles are limited by products, squares by memory; numbers are those of the table."
        )
        blocks.append(figure(lambda width: charts.roofline(works, products, rate, width, label), caption))
        if ceilings.flag("contended"):
            blocks.append(Text(text="Others used the processor when the ceilings were measured: they may be too low."))
    elif not products or not rate:
        blocks.append(Text(text="No chart: the ceilings of this machine were not measured (flatout check --measure)."))
    blocks.append(_roofline_table(rows, works))
    blocks += _matrix_units(doc.at("profile").at("matrix_units"))
    return Section(id="roofline", title="Against the ceilings of this machine", blocks=tuple(blocks))


def _products(ceilings: Part) -> dict[str, float]:
    """dtype -> FLOP/s of the products that were measured, integers left out."""
    measured = ceilings.at("gemm_flops_per_second")
    found = {clean(dtype): measured.at(dtype).number("value") for dtype in measured.names() if dtype != "int8"}
    return {dtype: value for dtype, value in found.items() if value and charts.can_be_drawn(value)}


def _bandwidth(ceilings: Part) -> float | None:
    """Of a copy, as operators read and write; else of reading."""
    for name in ("memory_copy_bytes_per_second", "memory_read_bytes_per_second"):
        if (value := ceilings.at(name).number("value")) and charts.can_be_drawn(value):
            return value
    return None


def _works(rows: list[Part]) -> list[Work]:
    """Those with FLOPs and bytes, numbered."""
    works: list[Work] = []
    for row in rows[:MOST_ROWS]:
        flops, moved, rate = (row.number(key) for key in ("flops", "bytes", "attained_flops_per_second"))
        if flops and moved and rate and charts.can_be_drawn(flops, moved, rate, flops / moved):
            work = Work(
                number=len(works) + 1,
                row=row.where,
                name=_class(row),
                flops_per_byte=flops / moved,
                flops_per_second=rate,
                bound=row.text("bound"),
            )
            works.append(work)
    return works


def _class(row: Part) -> str:
    return " ".join(filter(None, (row.text("operator_class") or row.text("class"), row.text("dtype"))))


def _roofline_table(rows: list[Part], works: list[Work]) -> Table:
    numbers = {work.row: work.number for work in works}
    made = []
    for row in rows[:MOST_ROWS]:
        share, of_time, rate = (row.number(key) for key in ("share_of_ceiling", "share", "attained_flops_per_second"))
        ceiling = row.text("ceiling_name")
        reached = Cell(text="unknown", note=_because(row.text("reason")))
        if share is not None:
            note = " · ".join(filter(None, (f"of {ceiling}" if ceiling else "", row.text("reason"))))
            reached = Cell(text=percent(share), note=note, bar=charts.share_bar(share))
        made.append(
            (
                Cell(text=f"{numbers[row.where]} {_class(row)}" if row.where in numbers else _class(row)),
                seconds_cell(row.number("seconds")),
                Cell(text="" if of_time is None else percent(of_time)),
                Cell(text="" if rate is None else format_rate(rate, "FLOP/s")),
                Cell(text={"compute": "products", "memory": "memory"}.get(row.text("bound"), "unknown")),
                reached,
            )
        )
    numeric = ("time a step", "of all", "reached", "share of the ceiling")
    named = heads(
        "operators", "time a step", "of all", "reached", "limited by", "share of the ceiling", numeric=numeric
    )
    return Table(caption="Classes of operators", heads=named, rows=tuple(made), more=_more(rows))


def _matrix_units(units: Part) -> list[Block]:
    if not units:
        return []
    share = units.number("share")
    named = units.text("unit") or "matrix units"
    rows = [(f"products on {named}", "unknown" if share is None else percent(share), units.text("reason"))]
    for one in units.parts("rest"):
        if isinstance(one.value, list) and len(one.value) == 2 and isinstance(one.value[0], str):
            why, seconds = clean(one.value[0]), Part({"seconds": one.value[1]}, one.where).number("seconds")
            rows.append(("not on them", format_seconds(seconds or 0.0), why))
    return [Facts(rows=tuple(rows))]


def profile(sources: Sources) -> Section | None:
    """Tables of what takes the time, longest first."""
    doc = sources["profile"].at("profile")
    total = sum(row.number("seconds") or 0.0 for row in doc.parts("operators"))
    waits = "Waits for the GPU, which cost nothing while it has work"
    blocks: list[Block] = [
        *_table(doc, "lines", "Lines of the script", ("line", "code", "time a step", "share"), _line),
        *_table(
            doc, "modules", "Modules, each with what is inside it", ("module", "calls", "forward", "backward"), _module
        ),
        *_table(
            doc,
            "operators",
            "Operators",
            ("operator", "phase", "line", "calls", "time a step", "share"),
            lambda row: _operator(row, total),
        ),
        *_table(
            doc, "kernels", "GPU kernels and copies", ("kernel", "kind", "calls", "time a step", "copied"), _kernel
        ),
        *_table(doc, "waits", waits, ("line", "operator", "calls", "waited a step"), _wait),
    ]
    reasons = doc.at("reasons")
    blocks += [
        Text(text=f"{clean(name).replace('_', ' ')}: unknown, because {_because(reasons.text(name))}")
        for name in reasons.names()[:20]
    ]
    blocks += [Text(text=note) for note in doc.texts("notes")[:20]]
    if not blocks:
        return None
    return Section(id="profile", title="Lines, modules and operators", blocks=tuple(blocks))


def _because(reason: str) -> str:
    return reason.removeprefix("unknown, ").removeprefix("because ")


def _table(
    doc: Part, key: str, caption: str, names: tuple[str, ...], cells: Callable[[Part], tuple[Cell, ...]]
) -> list[Block]:
    """The first rows are shown, the rest on request."""
    found = doc.parts(key)
    rows = tuple(map(cells, found[:MOST_ROWS]))
    if not rows:
        return []
    named, more = heads(*names, numeric=NUMERIC), _more(found)
    if len(rows) <= FIRST_ROWS:
        return [Table(caption=caption, heads=named, rows=rows, more=more)]
    rest = Table(caption=f"{caption}, continued", heads=named, rows=rows[FIRST_ROWS:], more=more)
    summary = f"{len(rows) - FIRST_ROWS} more rows: {caption[:1].lower()}{caption[1:]}"
    first = Table(caption=caption, heads=named, rows=rows[:FIRST_ROWS])
    return [first, Details(summary=summary, blocks=(rest,))]


def _more(rows: list[Part]) -> str:
    return f"and {len(rows) - MOST_ROWS:,} more in the document" if len(rows) > MOST_ROWS else ""


def _line(row: Part) -> tuple[Cell, ...]:
    return (
        Cell(text=f"{row.text('file')}:{row.number('line') or 0:.0f}", code=True, note=row.text("function")),
        Cell(text=row.text("text"), code=True),
        seconds_cell(row.number("seconds")),
        share_cell(row.number("share")),
    )


def _module(row: Part) -> tuple[Cell, ...]:
    kind, path, backward = row.text("kind"), row.text("path"), row.number("backward_seconds")
    depth = min(round(max(0.0, row.number("depth") or 0.0)), 12)
    return (
        Cell(text="· " * depth + (path or kind), code=True, note="" if kind == path else kind),
        _calls(row),
        seconds_cell(row.number("forward_seconds")),
        Cell(text="unknown", note=row.text("backward_reason")) if backward is None else seconds_cell(backward),
    )


def _operator(row: Part, total: float) -> tuple[Cell, ...]:
    return (
        Cell(text=row.text("name"), code=True, note=" ".join(filter(None, (row.text("shapes"), row.text("dtype"))))),
        Cell(text=row.text("phase")),
        Cell(text=row.text("line"), code=True, note=row.text("module")),
        _calls(row),
        seconds_cell(row.number("seconds")),
        share_cell((row.number("seconds") or 0.0) / total if total else None),
    )


def _kernel(row: Part) -> tuple[Cell, ...]:
    copied = row.number("bytes")
    return (
        Cell(text=row.text("name"), code=True, note=row.text("operator")),
        Cell(text=row.text("kind")),
        _calls(row),
        seconds_cell(row.number("seconds")),
        Cell(text="" if copied is None else format_bytes(copied)),
    )


def _wait(row: Part) -> tuple[Cell, ...]:
    return (
        Cell(text=row.text("line") or "line unknown", code=True),
        Cell(text=row.text("operator") or "synchronize"),
        _calls(row),
        seconds_cell(row.number("seconds")),
    )


def _calls(row: Part) -> Cell:
    return Cell(text=f"{row.number('calls') or 0:.3g}")
