"""Findings of a run and a profile, with the lines of code that they are about."""

from __future__ import annotations

import json

from flatout.report.html.blocks import Problem, Section
from flatout.report.html.reading import Part, Sources, clean
from flatout.report.step_text import percent
from flatout.units import format_bytes, format_seconds

MOST = 100
_ORDER = {"unusable": 0, "warning": 1, "note": 2}


def findings(sources: Sources) -> Section | None:
    """The most serious first, and what a run and a profile both found once."""
    found: dict[tuple[str, str], Problem] = {}
    for doc in sources.values():
        for one in doc.parts("findings")[:MOST]:
            found.setdefault((one.text("name"), one.text("title")), _problem(one))
    if not found:
        return None
    ordered = sorted(found.values(), key=lambda one: _ORDER.get(one.severity, 3))
    return Section(id="findings", title=f"Findings ({len(ordered)})", blocks=tuple(ordered))


def _problem(one: Part) -> Problem:
    change = one.at("plan_change")
    doubt, severity = one.text("if_wrong"), one.text("severity")
    return Problem(
        severity=severity if severity in _ORDER else "note",
        title=one.text("title"),
        evidence=one.text("evidence"),
        cost=_cost(one),
        remedy=one.text("remedy"),
        command=one.text("next_command"),
        lines=tuple(_line(line) for line in one.parts("lines")[:10]),
        doubt=f"Likely, not certain. If it is wrong: {doubt}" if one.text("confidence") == "likely" and doubt else "",
        change=clean(json.dumps(change.value, ensure_ascii=False)) if change else "",
    )


def _cost(one: Part) -> str:
    seconds, size, share = (one.number(key) for key in ("cost_seconds", "cost_bytes", "cost_share"))
    parts = []
    if seconds is not None:
        parts.append(f"{format_seconds(seconds)} a step")
    if size is not None:
        parts.append(format_bytes(size))
    if share is not None:
        parts.append(percent(share))
    return ", ".join(parts)


def _line(line: Part) -> tuple[str, str]:
    """(place, text) of [file, line, text]."""
    inside = Part({"all": line.value}, line.where)
    values = [one.value for one in inside.parts("all")]
    file, number, text = (*values, "", "", "")[:3]
    place = f"{file}:{number}" if number != "" else str(file)
    return clean(place), clean(str(text))
