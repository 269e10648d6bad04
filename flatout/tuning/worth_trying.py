"""Which levers a search tries, which first, and which it leaves out because they cannot pay.

Pairs are tried as well: two levers that may help together although one of them did not help by itself (bf16 with
compile).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flatout.levers.catalogue import INTERACTING
from flatout.levers.lever import Choice, Lever, Verdict, refuse
from flatout.levers.observed import Observed
from flatout.machine.description import Machine
from flatout.plan_choices import Exactness, allowed
from flatout.tuning.trial import SearchState
from flatout.tuning.windows import LEAST_GAIN, Pace

COMPARISON_SECONDS = 25.0
"""One comparison takes so long at the most."""
COMPILE_SECONDS = 15.0
"""That a compilation takes, as a rule; what it really took is measured."""
MUCH_SLOWER = 0.8
"""A lever that was so much slower by itself is not worth a second trial."""


def worth_trying(
    lever: Lever, machine: Machine, observed: Observed, exactness: Exactness, *, asked: bool = False
) -> Verdict:
    """The values to try, or why none. asked: somebody wants just this, whatever it is predicted to save."""
    if not allowed(lever.exactness, exactness):
        return refuse(f"it is {lever.exactness}, and --exactness is {exactness}")
    verdict = lever.applies(machine, observed)
    if not verdict or asked or lever.aim == "memory":
        return verdict
    saving = lever.saving(machine, observed)
    if saving.most >= LEAST_GAIN:
        return verdict
    why = f": {saving.why}" if saving.why else ""
    return refuse(f"predicted to save at most {max(0.0, saving.most):.1%} of a step{why}")


def saving_per_second(lever: Lever, machine: Machine, observed: Observed, restart_seconds: float) -> float:
    """What it is predicted to save of a step as it is now, per second of its trial."""
    step_seconds = observed.step_seconds or 0.01
    seconds = step_seconds * Pace.for_step(step_seconds, seconds=COMPARISON_SECONDS).least_steps
    if lever.switch != "live":
        seconds += restart_seconds
    return lever.saving(machine, observed).expected / (seconds + lever.compiles * COMPILE_SECONDS)


def pairs_worth_trying(state: SearchState, levers: Sequence[Lever]) -> Iterator[list[Choice]]:
    """Both of a pair that were dropped, or the one that was dropped before the other was kept; on top of what is kept
    when each is asked for."""
    for pair in INTERACTING:
        kept = {choice.field for choice in state.kept}
        missing = [name for name in pair if name not in kept]
        dropped = [choice for name in missing if (choice := _best_choice(state, levers, name)) is not None]
        if not dropped or len(dropped) < len(missing) or not _is_plausible(state, dropped):
            continue
        if len(dropped) == 2 or not _was_tried_with(state, dropped[0], pair):
            yield dropped


def _best_choice(state: SearchState, levers: Sequence[Lever], plan_field: str) -> Choice | None:
    """The best of the dropped values of a field; None if it was never measured."""
    measured = [
        trial
        for trial in state.trials
        if trial.plan_field == plan_field and trial.outcome == "dropped" and trial.comparison is not None
    ]
    if not measured:
        return None
    best = max(measured, key=lambda trial: trial.comparison.ratio if trial.comparison else 0.0)
    return Choice(next(lever for lever in levers if lever.plan_field == plan_field), best.value)


def _is_plausible(state: SearchState, choices: Sequence[Choice]) -> bool:
    ratios = [
        trial.comparison.ratio
        for trial in state.trials
        for choice in choices
        if trial.plan_field == choice.field and trial.value == choice.value and trial.comparison is not None
    ]
    return min(ratios, default=0.0) > MUCH_SLOWER


def _was_tried_with(state: SearchState, dropped: Choice, pair: tuple[str, str]) -> bool:
    """Was the other one on when this one was tried?"""
    partner = next(choice.label for choice in state.kept if choice.field in pair and choice.field != dropped.field)
    return any(partner in trial.on_top_of for trial in state.trials if trial.plan_field == dropped.field)
