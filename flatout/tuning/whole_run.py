"""The effect of a plan on a whole run, start-up included: the speedup of a step is not that of a run.

`flatout run` starts later than plain Python (it imports itself), and levers have start-up costs of their own
(compilation, copies of weights). Both are measured, compared with what each step saves, and, where the number of steps
is known, added up for a whole run.
"""

from __future__ import annotations

import math
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from flatout.environment import variables
from flatout.errors import TrialError
from flatout.script.child_command import child_command
from flatout.statistics import median
from flatout.tuning.windows import Pairing

STARTS = 3


@dataclass(frozen=True, kw_only=True)
class WholeRun:
    """Start-up and steps of a run, plain and planned. In seconds, but for `steps` and `payoff_steps`."""

    own_start_seconds: float
    """How much later than plain Python `flatout run` starts a script."""
    lever_start_seconds: float | None
    """Cost of the levers in the first steps; None: part of the step time, as whole runs were compared."""
    payoff_steps: int | None
    """Steps until both are recovered; None: nothing is saved."""
    steps: int | None = None
    """Of the whole script; None: unknown."""
    plain_seconds: float | None = None
    """Of a whole plain run: start-up as measured in trials, and all steps."""
    planned_seconds: float | None = None

    @property
    def ratio(self) -> float | None:
        if self.plain_seconds is None or self.planned_seconds is None:
            return None
        return self.plain_seconds / self.planned_seconds

    @classmethod
    def of(
        cls,
        final: Pairing,
        *,
        own_start_seconds: float,
        script_start_seconds: float,
        steps: int | None,
        steps_at_start: int = 0,
    ) -> WholeRun:
        """From the measurements; `script_start_seconds` is the time before the script's first step, or including the
        first `steps_at_start` steps."""
        plain, planned = final.baseline_seconds, final.candidate_seconds
        extra = own_start_seconds + (final.startup_seconds or 0.0)
        left = None if steps is None else steps - steps_at_start
        return cls(
            own_start_seconds=own_start_seconds,
            lever_start_seconds=final.startup_seconds,
            payoff_steps=math.ceil(extra / (plain - planned)) if plain > planned else None,
            steps=steps,
            plain_seconds=None if left is None else script_start_seconds + left * plain,
            planned_seconds=None if left is None else script_start_seconds + extra + left * planned,
        )


def own_start_seconds(folder: Path) -> float:
    """Measured on an empty script, alternating `flatout run` and plain Python. Takes about a second. TrialError where
    one of them fails, as on a full disk."""
    script = folder / "empty.py"
    script.write_text("")
    flatout = child_command("flatout", "run", "--no-plan", "--no-report", str(script))
    environment = {**variables(), "FLATOUT_RUNS_DIR": str(folder)}  # `flatout watch` shows the user's runs alone
    differences = []
    for _ in range(STARTS):
        plain, ours = (_seconds(command, environment) for command in ([sys.executable, str(script)], flatout))
        differences.append(ours - plain)
    return max(0.0, median(differences))


def _seconds(command: list[str], environment: dict[str, str]) -> float:
    began = time.perf_counter()
    ended = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True)
    if ended.returncode != 0:
        raise TrialError(f"{' '.join(command[-2:])} ended with code {ended.returncode}")
    return time.perf_counter() - began
