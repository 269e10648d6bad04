"""What TraceML (PyPI traceml-ai 0.5), which also watches unedited scripts, says of the same ones."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.scripts.catalogue import PublicScript
from benchmarks.scripts.faithfulness import RUN_LIMIT_SECONDS, blank_times
from benchmarks.scripts.workspace import fresh_workspace

LOGS = "traceml-logs"


@dataclass(frozen=True, kw_only=True)
class PeerSaid:
    """Its own words, cut short."""

    name: str
    exit_code: int | None
    seconds: float
    steps_found: int | None
    verdict: str | None
    why: str | None
    next_step: str | None
    lines_added_to_stdout: int  # lines of its own among the script's
    problem: str | None


def read_summary(logs: Path) -> Mapping[str, Any]:
    summaries = sorted(logs.rglob("final_summary.json"))
    return json.loads(summaries[-1].read_text()) if summaries else {}


def run_peer(script: PublicScript, checkout: Path, traceml: str, progress: Callable[[str], None]) -> PeerSaid:
    with fresh_workspace(script, checkout) as workspace:
        plain_name, *arguments = script.argv
        command = [traceml, "run", "--logs-dir", LOGS, plain_name, *(["--args", *arguments] if arguments else [])]
        progress(f"{script.name}: traceml run")
        finished = workspace.run(command, limit_seconds=RUN_LIMIT_SECONDS)
        summary = read_summary(workspace.directory / LOGS)
        stdout = blank_times(finished.stdout, script.time_patterns, workspace.checkout)
    diagnosis = summary.get("primary_diagnosis") or {}
    steps = ((summary.get("step_time") or {}).get("metadata") or {}).get("training_total_steps")
    own_lines = [line for line in stdout.splitlines() if line.startswith(("[TraceML]", "|  ", "+-----"))]
    return PeerSaid(
        name=script.name,
        exit_code=finished.exit_code,
        seconds=finished.seconds,
        steps_found=steps,
        verdict=diagnosis.get("status"),
        why=diagnosis.get("summary"),
        next_step=diagnosis.get("action"),
        lines_added_to_stdout=len(own_lines),
        problem=None if summary else finished.stderr.strip()[-300:] or "no summary written",
    )


def describe(said: PeerSaid) -> str:
    """Two lines for a terminal."""
    head = f"{said.name:22} {said.steps_found} steps found; {said.verdict}; exit code {said.exit_code}"
    return f"{head}\n{'':22} {said.problem or f'{said.why} {said.next_step}'}"
