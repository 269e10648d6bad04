"""A value as a small HTML table: what a notebook shows where a cell ends with it.

It takes its colours from the page around it, so it is readable in a light and in a dark notebook.

>>> table_html("Plan", [("threads", "2")]).count("<tr>")
1
"""

from __future__ import annotations

from collections.abc import Iterable

_TABLE = "border-collapse: collapse; font-variant-numeric: tabular-nums"
_CAPTION = "caption-side: top; text-align: left; font-weight: 600; padding: 0 0 0.3em; color: inherit"
_RULE = "border-top: 1px solid rgba(128, 128, 128, 0.4)"
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
