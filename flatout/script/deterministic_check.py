"""Is a script's training repeatable, and at what cost? Two deterministic runs and a plain one, as trials.

Each is a new process: forks of one process share their address layout, and may agree where two runs do not.

found = check_determinism(Target.from_command(["train.py"]))
found.equal, found.differing, found.cost
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from flatout.environment import deterministic_variables
from flatout.errors import ScriptError, TrialError
from flatout.script.entry import Target
from flatout.script.trial.answers import TrialHangs
from flatout.script.trial.messages import Command, DeterminismAnswer
from flatout.script.trial.process import TrialProcess
from flatout.script.trial.setup import TrialSetup, terminal_size
from flatout.script.work_folder import work_folder
from flatout.units import format_seconds

STEPS = 40
PATIENCE_SECONDS = 1800.0
"""Timeout of each run."""
MOST_SPREAD = 1.15
"""Where two equal runs differ by more, the cost cannot be measured."""


@dataclass(frozen=True, kw_only=True)
class DeterminismCheck:
    """What two deterministic runs and a plain one showed."""

    equal: bool
    steps: int
    """Steps that were compared; 0: no step was found, and the script was compared at its end."""
    tensors: int
    differing: tuple[str, ...]
    """Names of weights that differ between the two deterministic runs."""
    cost: float | None
    """Median time of a deterministic step over that of a plain one; None: too few steps, or too noisy."""
    error: str | None
    """torch's error, which names an operation that cannot be deterministic."""


def check_determinism(
    target: Target, stdin_file: Path | None = None, *, steps: int = STEPS, allow_network: bool = False
) -> DeterminismCheck:
    """stdin_file: what each run reads. allow_network: otherwise they have only a loopback interface.

    Raises ScriptError where the script fails in the plain run too, or trains nothing that could be compared.
    """
    target.check()
    with work_folder() as folder:
        as_is = TrialSetup(
            target=target,
            work_folder=folder,
            stdin_file=stdin_file,
            allow_network=allow_network,
            terminal_size=terminal_size(),
        )
        setup = replace(as_is, environment=deterministic_variables())
        plain = _run(as_is, steps, deterministic=False)
        if plain.error is not None:
            raise ScriptError(f"the script fails by itself: {plain.error}", remedy=plain.note)
        runs = []
        for _ in range(2):
            runs.append(run := _run(setup, steps, deterministic=True))
            if run.error is not None:
                return DeterminismCheck(
                    equal=False, steps=run.steps, tensors=len(run.weights), differing=(), cost=None, error=run.error
                )
    first, second = runs
    if not first.weights:
        raise ScriptError(
            "no weights were found", limit="those of two runs are compared", remedy="check a script that trains"
        )
    before, after = first.weights, second.weights
    differing = tuple(name for name in {**before, **after} if before.get(name) != after.get(name))
    if first.steps != second.steps:
        differing = (f"the number of steps: {first.steps} and {second.steps}", *differing)
    return DeterminismCheck(
        equal=not differing,
        steps=first.steps,
        tensors=len(first.weights),
        differing=differing,
        cost=_cost(plain, first, second),
        error=None,
    )


class _Run(NamedTuple):
    """What one run showed."""

    steps: int
    step_seconds: float | None
    weights: dict[str, str]
    """Name -> digest."""
    error: str | None
    """The script's own, in one line."""
    note: str
    """What may explain it."""


def _run(setup: TrialSetup, steps: int, *, deterministic: bool) -> _Run:
    command: Command = {"do": "determinism", "steps": steps, "deterministic": deterministic}
    with TrialProcess(setup, label="determinism") as trial:
        try:
            answer: DeterminismAnswer
            answer, end = trial.watch(command, PATIENCE_SECONDS)
        except TrialHangs as hang:
            waited = format_seconds(PATIENCE_SECONDS)
            raise TrialError(f"the script did not reach {steps} steps in {waited}{hang.last_at}") from None
    error, note = (None, "") if end is None else (end.headline or None, end.note)
    return _Run(answer["steps"], answer["step_seconds"], dict(answer["weights"]), error, note)


def _cost(plain: _Run, *runs: _Run) -> float | None:
    seconds = [one.step_seconds for one in runs if one.step_seconds]
    if not plain.step_seconds or len(seconds) < len(runs) or max(seconds) > MOST_SPREAD * min(seconds):
        return None
    return min(seconds) / plain.step_seconds
