"""What `flatout tune` makes of each script: its speed-up, what was kept and dropped, and the numbers' verdict."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.scripts.catalogue import PublicScript
from benchmarks.scripts.workspace import Finished, fresh_workspace

GRACE_SECONDS = 300  # beyond its budget, before it counts as hanging


@dataclass(frozen=True, kw_only=True)
class TriedLever:
    name: str
    kept: bool
    ratio: float | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """What tuning says of one script. `None` where its document did not tell."""

    name: str
    goal: float | None
    exit_code: int | None
    seconds: float
    speedup: float | None
    speedup_interval: tuple[float, float] | None
    levers: tuple[TriedLever, ...]
    numerics: str | None
    problem: str | None
    document: Mapping[str, Any] | None

    @property
    def broken(self) -> bool:
        return self.problem is not None or self.numerics == "rejected"

    @property
    def slower(self) -> bool:
        return self.speedup_interval is not None and self.speedup_interval[1] < 1

    @property
    def reaches_goal(self) -> bool:
        return self.goal is None or (self.speedup is not None and self.speedup >= self.goal)


def first_of(document: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path, or None."""
    value: Any = document
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def read_levers(trials: Any) -> tuple[TriedLever, ...]:
    return tuple(
        TriedLever(
            name=entry["label"],
            kept=entry["outcome"] == "kept",
            ratio=first_of(entry, "comparison.ratio"),
            reason=entry["reason"],
        )
        for entry in trials or ()
    )


def read_document(script: PublicScript, finished: Finished) -> Tuned:
    """The one place that knows the layout of what `flatout tune --json` prints."""
    document, problem = None, None
    try:
        document = json.loads(finished.stdout)
    except ValueError:
        problem = f"no JSON document; stderr ends: {finished.stderr.strip()[-300:]}"
    if finished.exit_code != 0:
        problem = problem or f"exit code {finished.exit_code}; stderr ends: {finished.stderr.strip()[-300:]}"
    body = document if isinstance(document, dict) else {}
    low, high = first_of(body, "final.comparison.low"), first_of(body, "final.comparison.high")
    nothing_kept = bool(body) and not body.get("kept")
    return Tuned(
        name=script.name,
        goal=script.goal,
        exit_code=finished.exit_code,
        seconds=finished.seconds,
        speedup=1.0 if nothing_kept else first_of(body, "final.comparison.ratio"),
        speedup_interval=(low, high) if low is not None and high is not None else None,
        levers=read_levers(body.get("trials")),
        numerics="unchanged" if nothing_kept else first_of(body, "proof.verdict"),
        problem=problem,
        document=document if isinstance(document, dict) else None,
    )


def tune_script(
    script: PublicScript,
    checkout: Path,
    flatout: Sequence[str],
    budget_seconds: int,
    progress: Callable[[str], None],
) -> Tuned:
    argv = script.argv if script.tuned_argv is None else script.tuned_argv
    command = [*flatout, "tune", "--json", "--budget", str(budget_seconds), *argv]
    with fresh_workspace(script, checkout, tuned=True) as workspace:
        progress(f"{script.name}: tuning for {budget_seconds} s")
        return read_document(script, workspace.run(command, limit_seconds=budget_seconds + GRACE_SECONDS))


def describe(result: Tuned) -> str:
    """A few lines for a terminal."""
    speed = "no speed-up told" if result.speedup is None else f"x{result.speedup:.2f}"
    if result.speedup_interval is not None:
        speed += " ({:.2f} to {:.2f})".format(*result.speedup_interval)
    goal = "" if result.goal is None else f"; goal x{result.goal:.2f} {'reached' if result.reaches_goal else 'MISSED'}"
    marks = "".join(f"; {word}" for word, said in (("BROKEN", result.broken), ("SLOWER", result.slower)) if said)
    lines = [f"{result.name:22} {speed}{goal}; numbers {result.numerics}; {result.seconds:.0f} s{marks}"]
    for lever in result.levers:
        ratio = "" if lever.ratio is None else f" x{lever.ratio:.2f}"
        lines.append(f"{'':22} {'kept' if lever.kept else 'dropped':8}{lever.name}{ratio} {lever.reason}")
    if result.problem:
        lines.append(f"{'':22} {result.problem}")
    return "\n".join(lines)
