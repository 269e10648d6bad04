"""One script at a time: plainly, with its steps timed, under `flatout profile` and under the peer."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.diagnose.catalogue import Script
from benchmarks.scripts.peer import LOGS, read_summary

LIMIT_SECONDS = 300
TIMED = Path(__file__).with_name("timed.py")


@dataclass(frozen=True, kw_only=True)
class Run:
    """How a command ended."""

    exit_code: int | None
    """None: it was stopped after LIMIT_SECONDS."""
    seconds: float
    stdout: str
    stderr: str

    @property
    def error(self) -> str:
        """Empty if all is well."""
        if self.exit_code == 0:
            return ""
        how = "no end" if self.exit_code is None else f"exit code {self.exit_code}"
        return f"{how}: {self.stderr.strip()[-300:]}"


def run(command: Sequence[str], folder: str) -> Run:
    began = time.perf_counter()
    try:
        done = subprocess.run(
            command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_SECONDS
        )
    except subprocess.TimeoutExpired as late:
        stderr = late.stderr.decode(errors="replace") if isinstance(late.stderr, bytes) else late.stderr or ""
        return Run(exit_code=None, seconds=time.perf_counter() - began, stdout="", stderr=stderr)
    return Run(exit_code=done.returncode, seconds=time.perf_counter() - began, stdout=done.stdout, stderr=done.stderr)


@dataclass(frozen=True, kw_only=True)
class Times:
    """Of a plain run with its steps noted."""

    seconds: float | None
    """From the first step to the last, made up by the share of the first; None if there are none in this process."""
    steps: int
    whole_seconds: float
    error: str


def time_steps(script: Script) -> Times:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "times.json"
        done = run([sys.executable, str(TIMED), str(script.path), str(out)], folder)
        if done.error:
            return Times(seconds=None, steps=0, whole_seconds=done.seconds, error=done.error)
        noted = json.loads(out.read_text())
    return Times(seconds=training_seconds(noted["ends"]), steps=noted["steps"], whole_seconds=done.seconds, error="")


def training_seconds(ends: Sequence[float]) -> float | None:
    """All steps, from the moments at which they ended. What lies between them (evaluation, saving) counts."""
    if len(ends) < 3:
        return None
    return (ends[-1] - ends[0]) * len(ends) / (len(ends) - 1)


def ask(script: Script, flatout: Sequence[str]) -> tuple[Run, dict[str, Any] | None]:
    """The document of `flatout profile --json`; None if there is none."""
    with tempfile.TemporaryDirectory() as folder:
        done = run([*flatout, "profile", "--json", str(script.path)], folder)
    try:
        document = json.loads(done.stdout)
    except ValueError:
        return done, None
    return done, document if isinstance(document, dict) else None


def ask_peer(script: Script, traceml: str) -> dict[str, Any]:
    """The words of `traceml run`."""
    with tempfile.TemporaryDirectory() as folder:
        done = run([traceml, "run", "--logs-dir", LOGS, str(script.path)], folder)
        summary = read_summary(Path(folder) / LOGS)
    diagnosis = summary.get("primary_diagnosis") or {}
    steps = ((summary.get("step_time") or {}).get("metadata") or {}).get("training_total_steps")
    return {
        "exit_code": done.exit_code,
        "seconds": done.seconds,
        "steps_found": steps,
        "verdict": diagnosis.get("status"),
        "why": diagnosis.get("summary"),
        "next_step": diagnosis.get("action"),
        "problem": None if summary else done.error or "no summary written",
    }


@contextlib.contextmanager
def second_process_busy(wanted: bool) -> Iterator[None]:
    """One core is taken by somebody else meanwhile."""
    if not wanted:
        yield
        return
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"], stdin=subprocess.DEVNULL)
    try:
        yield
    finally:
        busy.kill()
        busy.wait()
