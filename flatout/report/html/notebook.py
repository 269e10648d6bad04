"""The verdict on a result, as a notebook shows it."""

from __future__ import annotations

from collections.abc import Mapping

from flatout.notebook_tables import table_html
from flatout.report.html.reading import Part
from flatout.report.html.verdicts import verdict


def verdict_html(kind: str, payload: Mapping[str, object], rows: tuple[tuple[str, str], ...] = ()) -> str:
    """Of what a document of that kind holds, and `rows` after it."""
    found = verdict({kind: Part(payload, kind)})
    detail = (("", found.detail),) if found.detail else ()
    return table_html(found.headline, (*detail, *found.lines, *rows))
