"""What a search may try, what each change is expected to save, and what is left out because it cannot pay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from flatout.levers.first_compilation import usual_compile_seconds
from flatout.levers.lever import COSTS_TIME, Choice, Lever, Saving, Verdict, refuse, split_by_switch
from flatout.levers.observed import Observed
from flatout.machine.description import Machine
from flatout.plan_choices import ChoiceValue, Exactness, allowed
from flatout.search.deadline import Deadline
from flatout.search.search import Proposal
from flatout.tuning.history import History, Training
from flatout.tuning.proof import LEAST_LOSSES
from flatout.tuning.results import SearchState
from flatout.tuning.windows import LEAST_GAIN, FewSteps, Pace
from flatout.units import format_seconds

COMPARISON_SECONDS = 25.0
"""The most that one comparison takes."""
TRIALS_COST = 2.0
"""A typical trial takes this many times the fewest steps that can decide."""
A_FEW = 4
"""Trials: where there is time for this many, the most promising are tried one by one, because one that is predicted to
help may be harmful."""
BUNDLE_SAVING = 0.03
"""Predicted share of a step: what saves less waits for its own trial."""


@dataclass(frozen=True, kw_only=True)
class SearchLimits:
    """What bounds a search."""

    deadline: Deadline
    exactness: Exactness = "reduced"
    total_steps: int | None = None
    """How many steps the script runs; None: unknown."""
    only: tuple[tuple[str, ChoiceValue], ...] | None = None
    """Try only these (plan field, value) choices: how a plan from elsewhere is verified. None: whatever applies."""
    fit_bytes: int | None = None
    """Most memory that the tensors of a step may take; None: no limit."""


class Proposals:
    """Proposals of `levers`, given `state`."""

    def __init__(
        self,
        levers: Sequence[Lever],
        machine: Machine,
        state: SearchState,
        limits: SearchLimits,
        kind: str,
        history: History,
        restart_seconds: Callable[[Sequence[Choice]], float],
    ) -> None:
        """kind: of the trials, 'script' or 'step'. restart_seconds: of one more of them under these choices."""
        self._levers = {lever.name: lever for lever in levers}
        self._machine, self._state, self._kind = machine, state, kind
        self._exactness, self._only = limits.exactness, None if limits.only is None else dict(limits.only)
        self._history, self._restart_seconds = history, restart_seconds

    def names(self) -> list[str]:
        if self._only is None:
            return [name for name, lever in self._levers.items() if not self._is_fitted(lever)]
        return [
            name
            for name, lever in self._levers.items()
            if lever.plan_field in self._only and lever.takes(self._only[lever.plan_field])
        ]

    def proposal(self, name: str) -> Proposal[Choice]:
        lever, asked = self._levers[name], self._only is not None
        seen, few = self._state.observed, self._state.few_steps
        found = worth_trying(lever, self._machine, seen, self._exactness, asked=asked, few=few, kind=self._kind)
        values, reason = found.values, found.reason
        if self._only is not None and values:
            wanted = self._only[lever.plan_field]
            values = (wanted,) if wanted in values else ()
            reason = f"{lever.plan_field} = {wanted!r} is not among the values tried here: {found.values}"
        kept = {one.value for one in self._state.kept if one.lever is lever}
        candidates = [Choice(lever, value) for value in values if lever.surpassed_by.get(value) not in kept]
        candidates.sort(key=lambda one: -self.saving(one).expected)
        return Proposal(label=name, candidates=tuple(candidates), reason=reason)

    def saving(self, choice: Choice) -> Saving:
        """The lever's prediction, corrected by earlier tunes. It is against the plain step: where another value of the
        same lever is kept, nothing says which is faster, and this one may save nothing of what that one saved."""
        own = choice.lever.saving(self._machine, self._state.observed)
        if any(one.lever is choice.lever and one.value != choice.value for one in self._state.kept):
            undone = self._saving_of_undoing(choice.field)
            expected, least = min(own.expected, 0.0), min(own.least, undone)
            own = replace(own, expected=expected, least=least, why="another value of it is kept")
        return self._history.corrected(own, choice.label, self.training)

    def _saving_of_undoing(self, field: str) -> float:
        """At worst, of the step with it; below 0. 0 where that was not measured."""
        trial = self._state.kept_trial(field)
        if trial is None or trial.comparison is None:
            return 0.0
        return min(0.0, 1.0 - (trial.comparison.high if trial.comparison.has_interval else trial.comparison.ratio))

    def promise(self, name: str) -> float:
        """The greatest is tried next."""
        lever, state = self._levers[name], self._state
        best = next(iter(self.proposal(name).candidates), None)
        saving = lever.saving(self._machine, state.observed) if best is None else self.saving(best)
        value = None if best is None else best.value
        return saving_per_second(lever, saving.expected, state.observed, self._start_seconds(best), value)

    def leading(self) -> list[str]:
        """Levers of which the others depend, as where the model is: what these save is measured under them."""
        offered = {name: found.candidates[0] for name in self.names() if (found := self.proposal(name)).candidates}
        return [name for name, one in offered.items() if one.lever.comes_first and self.saving(one).expected > 0]

    def bundle(self, trial_seconds: float, seconds_left: float) -> tuple[Choice, ...]:
        """Levers that are predicted to help and quick to switch, where there is no time to try even a few one by
        one."""
        offered = [found.candidates[0] for name in self.names() if (found := self.proposal(name)).candidates]
        if self._only is not None or TRIALS_COST * trial_seconds * min(A_FEW, len(offered)) < seconds_left:
            return ()
        return tuple(choice for choice in offered if self._belongs_in_a_bundle(choice, trial_seconds))

    @property
    def training(self) -> Training:
        """What trains now."""
        state = self._state
        return Training.of(self._kind, state.loop, state.first_observed, state.observed.device)

    def _belongs_in_a_bundle(self, choice: Choice, trial_seconds: float) -> bool:
        quick = not choice.lever.compiles and self._start_seconds(choice) <= trial_seconds
        return quick and self.saving(choice).expected >= BUNDLE_SAVING  # of time, also where it is there for memory

    def _start_seconds(self, choice: Choice | None) -> float:
        """Of a trial that it has to be on from the start of; 0 where it can be switched on in a live one."""
        from_start, live = split_by_switch(() if choice is None else (choice,))
        return 0.0 if live else self._restart_seconds(from_start)

    def _is_fitted(self, lever: Lever) -> bool:
        """Was it tried already to meet the memory limit?"""
        fit = self._state.fit
        return fit is not None and (lever.aim == "memory" or any(one.lever is lever for one in fit.choices))


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
