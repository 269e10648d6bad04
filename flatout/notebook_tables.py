"""A value as a small HTML table, or as its text: what a notebook shows where a cell ends with it.

Both take their colours from the page around them, so they are readable in a light and in a dark notebook.

>>> table_html("Plan", [("threads", "2")]).count("<tr>")
1
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

_TABLE = "border-collapse: collapse; font-variant-numeric: tabular-nums"
_CAPTION = "caption-side: top; text-align: left; font-weight: 600; padding: 0 0 0.3em; color: inherit"
_RULE = "border-top: 1px solid rgba(128, 128, 128, 0.4)"
_TEXT = "font-family: var(--jp-code-font-family, monospace); line-height: 1.3; white-space: pre-wrap; color: inherit"
_CELL = f"text-align: left; vertical-align: top; padding: 0.25em 1.25em 0.25em 0; {_RULE}"


def table_html(title: str, rows: Iterable[tuple[str, ...]]) -> str:
    """The first of each row is its name. All texts are escaped."""
    from html import escape  # here: `flatout run` imports this module before the script starts

    def cells(*texts: str) -> str:
        return "".join(f'<td style="{_CELL}">{escape(text)}</td>' for text in texts)

    written = "".join(
        f'<tr><th scope="row" style="{_CELL}; font-weight: 400">{escape(name)}</th>{cells(*texts)}</tr>'
        for name, *texts in rows
    )
    return f'<table style="{_TABLE}"><caption style="{_CAPTION}">{escape(title)}</caption>{written}</table>'


class Printer(Protocol):
    """IPython's."""

    def text(self, text: str) -> object: ...


class ShownAsText:
    """Of a result whose `str()` is written for people: notebooks and IPython show that instead of all its fields, and a
    Python console its first line."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {next(iter(str(self).splitlines()), '')}>"

    def _repr_html_(self) -> str:
        from html import escape

        return f'<pre style="{_TEXT}">{escape(str(self))}</pre>'

    def _repr_pretty_(self, printer: Printer, cycle: bool) -> None:
        printer.text(str(self))
