"""What a section is made of: the template has a form for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from markupsafe import Markup


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Of a table. `bar`: a share, drawn behind a number that says the same."""

    text: str
    code: bool = False
    note: str = ""
    """Under the text, smaller."""
    swatch: str = ""
    """Class of a part of a chart whose legend this row is."""
    bar: Markup | None = None
    chart: Markup | None = None


@dataclass(frozen=True, kw_only=True)
class Head:
    text: str
    numeric: bool = False
    chart: Markup | None = None
    """An axis under the text."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """The first cell of a row is its header."""

    kind: ClassVar[str] = "table"
    caption: str
    heads: tuple[Head, ...]
    rows: tuple[tuple[Cell, ...], ...]
    more: str = ""
    """What is left out."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Names and values; a note under a value."""

    kind: ClassVar[str] = "facts"
    rows: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One chart, drawn for wide and for narrow screens."""

    kind: ClassVar[str] = "figure"
    wide: Markup
    narrow: Markup
    caption: str


@dataclass(frozen=True, kw_only=True)
class Text:
    kind: ClassVar[str] = "text"
    text: str
    tone: str = ""
    """'' or 'caution'."""


@dataclass(frozen=True, kw_only=True)
class Code:
    kind: ClassVar[str] = "code"
    label: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A finding."""

    kind: ClassVar[str] = "problem"
    severity: str
    title: str
    evidence: str
    cost: str
    remedy: str
    command: str
    lines: tuple[tuple[str, str], ...]
    """(place, text of the line)."""
    doubt: str
    change: str


@dataclass(frozen=True, kw_only=True)
class Details:
    """Closed until it is wanted; printed open."""

    kind: ClassVar[str] = "details"
    summary: str
    blocks: tuple[Block, ...]


Block = Table | Facts | Figure | Text | Code | Problem | Details


@dataclass(frozen=True, kw_only=True)
class Section:
    """`id`: the anchor that the list of contents links to."""

    id: str
    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The answer: one sentence that can be read from across a room, what it rests on, and what else was found."""

    headline: str
    tone: str
    """'good', 'bad' or ''."""
    detail: str
    lines: tuple[tuple[str, str], ...] = ()
    """(of what, in words)."""
    cautions: tuple[str, ...] = ()
    """What to know before trusting it."""
