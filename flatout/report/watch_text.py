"""What `flatout watch` shows, in words."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from flatout.diagnose.watched import Watched
from flatout.machine.processes import ProcessUse
from flatout.report.live_text import LiveView, condition_text, devices_rows, finding_lines, live_rows
from flatout.terminal import printable
from flatout.units import format_bytes, format_seconds

LABEL = 10
MOST_SHOWN = 8
"""Processes below a run."""


def watched_text(found: Watched, columns: int | None = None) -> str:
    """One run in full, or a line for each; then the devices. columns: lines are broken there; None: not at all."""
    rows = _one_run(found) if found.single else _all_runs(found)
    return "\n".join(line for label, text in rows for line in _lines(label, text, columns))


def _one_run(found: Watched) -> list[tuple[str, str]]:
    (seen,) = found.runs
    view = LiveView(
        state=seen.state,
        condition=seen.condition,
        clock_seconds=found.clock_seconds,
        ceilings=found.ceilings,
        devices=found.devices if seen.condition in ("running", "stopped") else None,
        energy=found.energy if seen.condition == "running" else None,
        ranks=found.ranks,
    )
    return [*live_rows(view), *_processes(found.processes), *finding_lines(seen.state.findings)]


def _processes(processes: Sequence[ProcessUse]) -> list[tuple[str, str]]:
    """Those below the run, the largest first."""
    if not processes:
        return []
    order = sorted(processes, key=lambda one: one.resident_bytes, reverse=True)
    rows = [
        ("processes", f"{len(order)} below it" + (f"; the {MOST_SHOWN} largest:" if len(order) > MOST_SHOWN else ""))
    ]
    for one in order[:MOST_SHOWN]:
        cpu = format_seconds(one.cpu_seconds)
        rows.append(
            ("", f"process {one.pid} {one.name}: {format_bytes(one.resident_bytes)} resident, {cpu} of CPU time")
        )
    return rows


def _all_runs(found: Watched) -> list[tuple[str, str]]:
    rows = []
    for seen in found.runs:
        state = seen.state
        view = LiveView(state=state, condition=seen.condition, clock_seconds=found.clock_seconds)
        steps = f"step {state.steps:,}" if state.steps else "no step yet"
        speed = f"{format_seconds(state.step_seconds)} a step" if state.step_seconds else ""
        rows.append(("run", " · ".join(filter(None, (state.script, condition_text(view), steps, speed)))))
    if found.runs_unknown_because is not None:
        rows.append(("runs", f"unknown: {found.runs_unknown_because}"))
    elif not rows:
        rows.append(("runs", "none: flatout run is not running here, and no run has ended within the last hour"))
    elif any(seen.condition in ("running", "stopped") for seen in found.runs):
        rows.append(("", "to follow one: flatout watch PID"))
    return [*rows, *devices_rows(found.devices)]


def _lines(label: str, text: str, columns: int | None) -> Sequence[str]:
    text = printable(text)
    if columns is None:
        return [f"{label:<{LABEL}}{text}"]
    width = max(20, columns - LABEL - 1)
    pieces = textwrap.wrap(text, width) or [""]
    return [f"{label if place == 0 else '':<{LABEL}}{piece}" for place, piece in enumerate(pieces)]
