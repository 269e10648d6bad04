"""Errors for a budget, or a script, that is too short: what takes the time, and how much would be enough.

They reach people at the command line and callers of `flatout.tune` alike, so they name the option of both.
"""

from __future__ import annotations

import math

from flatout.errors import ScriptError
from flatout.script.trial.answers import MORE_STEPS, TrialHangs
from flatout.search.deadline import Deadline
from flatout.search.search import SEARCH_SHARE
from flatout.tuning.windows import FewSteps
from flatout.units import format_seconds

TRIALS_WANTED = 4
LEAST_INCREASE = 1.5
"""Times the budget that was too short: the script may have been measured while the machine was less busy."""
MORE_TIME = "allow more time: --budget (in Python: seconds=)"


def no_step(name: str, hang: TrialHangs, startup_seconds: float | None, deadline: Deadline) -> ScriptError:
    """The script had made no step when the search's time was up; `startup_seconds`: until its first step, if known."""
    what = f"{name}: no step in {format_seconds(hang.seconds)}{hang.last_at}"
    if startup_seconds is not None:
        what = f"{name}: starting it takes {format_seconds(startup_seconds)}, and no time was left to time its steps"
    return ScriptError(
        what,
        limit=f"the budget is {format_seconds(deadline.budget_seconds)}",
        remedy=f"{MORE_TIME}, if the script starts slowly or its steps are long; if it trains in processes that it "
        "starts, as by mp.spawn: --own-ranks 2 (own_ranks=2)",
    )


def too_slow(
    name: str, startup_seconds: float, step_seconds: float, steps_a_trial: int, deadline: Deadline
) -> ScriptError:
    """Not even one lever can be tried in the time that `deadline` leaves."""
    trial_seconds = steps_a_trial * step_seconds
    wanted_seconds = deadline.reserved_seconds
    wanted_seconds += (startup_seconds + TRIALS_WANTED * trial_seconds) / SEARCH_SHARE
    wanted_seconds = max(wanted_seconds, LEAST_INCREASE * deadline.budget_seconds)
    smaller = ", or make the script's steps smaller" if trial_seconds > startup_seconds else ""
    return ScriptError(
        f"{name}: starting it takes {format_seconds(startup_seconds)}, and a step {format_seconds(step_seconds)}",
        limit=f"trying one lever takes about {steps_a_trial} steps, and {_left(deadline)}",
        remedy=f"try {_budget(wanted_seconds)}{smaller}",
    )


def too_slow_for_whole_runs(
    name: str, startup_seconds: float, step_seconds: float, few: FewSteps, trial_seconds: float, deadline: Deadline
) -> ScriptError:
    """The same where whole runs are compared."""
    runs, long = 2 * few.pace.least_pairs, format_seconds(trial_seconds)
    start, step = format_seconds(startup_seconds), format_seconds(step_seconds)
    wanted_seconds = deadline.reserved_seconds + deadline.elapsed_seconds + TRIALS_WANTED * trial_seconds
    return ScriptError(
        f"{name} has {few.steps} steps: starting it takes {start} including the first, and each of the others {step}",
        limit=f"trying one lever takes {runs} whole runs, about {long}, and {_left(deadline)}",
        remedy=f"{MORE_STEPS}, or try {_budget(max(wanted_seconds, LEAST_INCREASE * deadline.budget_seconds))}",
    )


def too_few_to_fit(name: str, steps: int) -> ScriptError:
    """Where whole runs are compared, and a memory limit is asked for."""
    limit = "a memory limit (fit) needs several steps of one run to measure"
    return ScriptError(f"{name} has {steps} steps", limit=limit, remedy=f"{MORE_STEPS}, or tune it without a limit")


def _left(deadline: Deadline) -> str:
    left = format_seconds(deadline.seconds_left) if deadline.seconds_left else "nothing"
    return f"{left} of the budget of {format_seconds(deadline.budget_seconds)} is left for that, apart from the proof"


def budget_option(seconds: float) -> str:
    """For the command line: '--budget 40s' or '--budget 3m', rounded up."""
    rounded = _round_up(seconds)
    return f"--budget {rounded}s" if rounded <= 60 else f"--budget {rounded // 60}m"


def _budget(seconds: float) -> str:
    return f"{budget_option(seconds)} (in Python: seconds={_round_up(seconds)})"


def _round_up(seconds: float) -> int:
    unit = 10 if seconds <= 60 else 60
    return unit * math.ceil(seconds / unit)
