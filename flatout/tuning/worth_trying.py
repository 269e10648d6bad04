"""Which levers a search tries, which first, and which it leaves out because they cannot pay."""

from __future__ import annotations

from flatout.levers.first_compilation import usual_compile_seconds
from flatout.levers.lever import COSTS_TIME, Lever, Verdict, refuse
from flatout.levers.observed import Observed
from flatout.machine.description import Machine
from flatout.plan_choices import Exactness, allowed
from flatout.tuning.few_steps import FewSteps
from flatout.tuning.proof import LEAST_LOSSES
from flatout.tuning.windows import LEAST_GAIN, Pace
from flatout.units import format_seconds

COMPARISON_SECONDS = 25.0
"""The most that one comparison takes."""


def worth_trying(
    lever: Lever,
    machine: Machine,
    observed: Observed,
    exactness: Exactness,
    *,
    asked: bool = False,
    few: FewSteps | None = None,
    kind: str = "script",
) -> Verdict:
    """The values to try, or why none. asked: the user asked for it, whatever it is predicted to save. few: the script's
    length, where whole runs are compared. kind: of the trials, 'script' or 'step'."""
    if not allowed(lever.exactness, exactness):
        return refuse(f"it is {lever.exactness}, and exactness is limited to {exactness}")
    if few is not None and lever.exactness == "reduced" and few.compared < LEAST_LOSSES:
        return refuse(f"reduced is proved by the losses of {LEAST_LOSSES} steps with it, and there are {few.compared}")
    verdict = lever.applies(machine, observed)
    if not verdict or asked:
        return verdict
    if few is not None and lever.compiles and observed.step_seconds is not None:
        seconds = few.compared * observed.step_seconds
        if seconds < (compiling := min(usual_compile_seconds(observed, value) for value in verdict.values)):
            usual = format_seconds(compiling)
            return refuse(f"compiling usually takes {usual}, and all steps of a run {format_seconds(seconds)}")
    saving = lever.saving(machine, observed)
    if saving.most >= LEAST_GAIN:
        return verdict
    if saving == COSTS_TIME:
        use = "flatout tune --fit" if kind == "script" else "flatout.fit_to_memory"
        return refuse(f"saves memory, costs time: use {use}")
    why = f": {saving.why}" if saving.why else ""
    return refuse(f"predicted to save at most {max(0.0, saving.most):.1%} of a step{why}")


def least_trial_seconds(observed: Observed) -> float:
    """Time of the fewest steps that can decide, in one process."""
    step_seconds = observed.step_seconds or 0.01
    return step_seconds * Pace.for_step(step_seconds, seconds=COMPARISON_SECONDS).least_steps


def saving_per_second(
    lever: Lever, expected: float, observed: Observed, restart_seconds: float, value: object = None
) -> float:
    """Expected saving per second of the lever's trial. What is expected to cost time ranks after everything that saves
    some, the quickest trial first."""
    seconds = least_trial_seconds(observed)
    if lever.switch != "live":
        seconds += restart_seconds
    seconds += lever.compiles * usual_compile_seconds(observed, str(value))
    return expected / seconds if expected > 0 else expected * seconds
