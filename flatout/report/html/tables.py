"""Cells, heads and figures that several sections have."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

from markupsafe import Markup

from flatout.report.html import charts
from flatout.report.html.blocks import Block, Cell, Figure, Head, Table
from flatout.report.html.reading import Part
from flatout.report.step_text import percent
from flatout.units import format_bytes, format_seconds

Form = Callable[[float], str]


def figure(draw: Callable[[float], Markup], caption: str) -> Figure:
    """The same chart for wide and narrow screens."""
    return Figure(wide=draw(charts.WIDE), narrow=draw(charts.NARROW), caption=caption)


def stacked(
    parts: Sequence[tuple[str, str, float]],
    label: str,
    caption: str,
    names: Sequence[str],
    form: Form,
) -> list[Block]:
    """A bar of parts that are (name, class, size), and the table that is its legend, with these names of columns."""
    total = sum(size for *_, size in parts)
    bar = charts.stacked_bar([(kind, size) for _, kind, size in parts], label)
    rows = tuple(
        (Cell(text=name, swatch=kind), Cell(text=form(size)), share_cell(size / total)) for name, kind, size in parts
    )
    table = Table(caption=caption, heads=heads(*names, numeric=names[1:]), rows=rows)
    return [Figure(wide=bar, narrow=bar, caption=""), table]


def heads(*texts: str, numeric: Container[str] = ()) -> tuple[Head, ...]:
    """Of a table's columns; numeric: those of numbers."""
    return tuple(Head(text=text, numeric=text in numeric) for text in texts)


def seconds_cell(seconds: float | None) -> Cell:
    return Cell(text="unknown" if seconds is None else format_seconds(seconds))


def bytes_cell(size: float | None) -> Cell:
    return Cell(text="unknown" if size is None else format_bytes(size))


def share_cell(share: float | None) -> Cell:
    return Cell(text="") if share is None else Cell(text=percent(share), bar=charts.share_bar(share))


def speed_cell(comparison: Part) -> Cell:
    """A speedup with its interval."""
    ratio, low, high = (comparison.number(key) for key in ("ratio", "low", "high"))
    note = f"{low:.2f} to {high:.2f}" if low and high else ""
    return Cell(text="not timed" if ratio is None else f"×{ratio:.2f}", note=note)
