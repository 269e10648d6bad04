"""Is a script's training repeatable, and what does that cost? Two deterministic runs and a plain one, as trials.

found = check_determinism(MemoryRequest(target=Target.from_command(["train.py"]), steps=40))
found.equal, found.differing, found.cost
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flatout.environment import DETERMINISTIC
from flatout.errors import ScriptError, TrialError
from flatout.script.memory_trial import MemoryRequest, run_child
from flatout.script.work_folder import work_folder

STEPS = 40
MOST_SPREAD = 1.15
"""Two like runs that are further apart say nothing about what the switches cost."""
CHILD = "flatout.script.deterministic_child"


@dataclass(frozen=True, kw_only=True)
class DeterminismCheck:
    """What two deterministic runs and a plain one showed."""

    equal: bool
    steps: int
    """That were compared; 0: the script was compared at its end, no step was found."""
    tensors: int
    differing: tuple[str, ...]
    """Names of weights that differ between the two deterministic runs."""
    cost: float | None
    """Median time of a deterministic step over that of a plain one; None: too few steps, or too noisy to tell."""
    error: str | None
    """torch's own words, which name an operation that cannot be deterministic."""


def check_determinism(request: MemoryRequest) -> DeterminismCheck:
    """Raises ScriptError where the script fails without the switches too, or trains nothing that could be compared."""
    request.target.check()
    plain = _run(request, deterministic=False)
    if plain["error"] is not None:
        raise ScriptError(f"the script fails by itself: {plain['error']}")
    first = _run(request, deterministic=True)
    if first["error"] is not None:
        return _failed(first)
    second = _run(request, deterministic=True)
    if second["error"] is not None:
        return _failed(second)
    if not first["weights"]:
        raise ScriptError("no weights were seen", limit="those of two runs are compared", remedy="name what trains")
    before, after = dict(map(tuple, first["weights"])), dict(map(tuple, second["weights"]))
    differing = tuple(name for name in {**before, **after} if before.get(name) != after.get(name))
    if first["steps"] != second["steps"]:
        differing = (f"the number of steps: {first['steps']} and {second['steps']}", *differing)
    return DeterminismCheck(
        equal=not differing,
        steps=first["steps"],
        tensors=len(first["weights"]),
        differing=differing,
        cost=_cost(plain, first, second),
        error=None,
    )


def _run(request: MemoryRequest, *, deterministic: bool) -> dict[str, Any]:
    with work_folder() as folder:
        answer = run_child(
            CHILD,
            request,
            folder,
            words={"deterministic": deterministic},
            changes=DETERMINISTIC if deterministic else {},
        )
    if answer["event"] == "stopped":
        raise TrialError(f"stopped before the script's first write: {answer['reason']}")
    if answer["event"] == "refused":
        raise ScriptError(answer["reason"])
    return answer


def _failed(run: dict[str, Any]) -> DeterminismCheck:
    return DeterminismCheck(
        equal=False, steps=run["steps"], tensors=len(run["weights"]), differing=(), cost=None, error=run["error"]
    )


def _cost(plain: dict[str, Any], *runs: dict[str, Any]) -> float | None:
    seconds = [one["step_seconds"] for one in runs]
    if not plain["step_seconds"] or not all(seconds) or max(seconds) > MOST_SPREAD * min(seconds):
        return None
    return float(min(seconds) / plain["step_seconds"])
