"""Fresh processes decide about what a search has kept: are the numbers right, and is it really faster?

What fails is taken out: the lever at fault where the numbers are off, everything where the whole is not faster.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from flatout.errors import TrialError
from flatout.levers.catalogue import in_order
from flatout.levers.first_compilation import COMPILED_AGAIN
from flatout.levers.lever import Choice
from flatout.plan_choices import Exactness
from flatout.search.deadline import Deadline
from flatout.timing import LoadWatch
from flatout.tuning import last_comparison, prover
from flatout.tuning.few_steps import FewSteps
from flatout.tuning.fitting import Fit
from flatout.tuning.last_comparison import compare_in_fresh_processes, trials_as_used
from flatout.tuning.prover import Pattern, Prover
from flatout.tuning.results import Proof, SearchState
from flatout.tuning.trials import Trials
from flatout.tuning.whole_run import WholeRun, own_start_seconds, whole_run
from flatout.tuning.windows import Pace, Pairing

COMPARISON_SHARE, LEAST_COMPARISON_SECONDS = 0.25, 5.0
"""Of the time that is left for the verifier, for the last comparison; twice that where it needs as much, or what a
short proof leaves: without a comparison that is certain, all that was found is given back."""
PROOF_MARGIN = 1.5
"""Times the least that a proof takes."""
STEPS_SHARE = 0.4
"""Of the whole budget: what a search keeps back for the verifier's steps at the most, beside its starts."""

RUNS_TO_PROVE_REDUCED = 3
"""Beside the plain run's check steps, a plain one with 16-bit noise, and one left to itself."""

Progress = Callable[[str], None]


def least_seconds(
    step_seconds: float, restart_seconds: float, trials: Trials, budget_seconds: float, few: FewSteps | None = None
) -> float:
    """What a search has to leave for proof and last comparison. few: the script's length, where runs are compared."""
    compared = trials_as_used(trials, few)
    compared_start_seconds = restart_seconds + trials.loading_seconds - compared.loading_seconds
    starts, whole = (
        prover.least_seconds(Pattern(step_seconds=seconds, startup_seconds=restart_seconds, few=few), trials)
        + last_comparison.least_seconds(seconds, compared_start_seconds, compared, few=few)
        for seconds in (0.0, step_seconds)
    )
    if few is not None:  # runs cannot be made shorter: a budget that is too short for them is refused
        return whole
    return starts + min(whole - starts, STEPS_SHARE * budget_seconds)


class FailedClaim(NamedTuple):
    """A lever that changes the numbers by more than it claims."""

    choice: Choice
    reason: str
    may_be_reduced: bool
    """Do the check steps allow it to claim 'reduced'?"""


class Verifier:
    """Proves and measures `state.kept` before `deadline`, and takes out of it what does not hold."""

    def __init__(
        self,
        trials: Trials,
        state: SearchState,
        deadline: Deadline,
        progress: Progress,
        exactness: Exactness = "reduced",
    ) -> None:
        self.trials, self.state, self._deadline, self._progress = trials, state, deadline, progress
        self._exactness = exactness
        """The weakest claim that may be made."""
        share, pattern = COMPARISON_SHARE * deadline.seconds_left, _pattern(state)
        self._compared = trials_as_used(trials, state.few_steps)
        needed = last_comparison.least_seconds(
            pattern.step_seconds,
            pattern.startup_seconds + trials.loading_seconds - self._compared.loading_seconds,
            self._compared,
            pattern.levers_start_seconds,
            state.few_steps,
            last_comparison.WANTED_PROCESS_PAIRS,
        )
        claims = {choice.exactness for choice in state.kept}
        beside_proof = deadline.seconds_left - PROOF_MARGIN * prover.least_seconds(pattern, trials, claims)
        self._comparison_seconds = max(LEAST_COMPARISON_SECONDS, share, min(needed, max(2 * share, beside_proof)))
        self.warnings: list[str] = []
        before = deadline.reserving(self._comparison_seconds)
        self._prover = Prover(trials, pattern, before, progress)
        self._proved = 0
        """Levers in the set that was proved and then partly given back."""

    def run(self) -> tuple[Proof | None, Pairing | None]:
        with self._prover:
            return self._run()

    def _run(self) -> tuple[Proof | None, Pairing | None]:
        proof: Proof | None = None
        while self.state.kept:
            proof = self._prover.prove(self.state.kept)
            if proof.holds:
                break
            for failed in self._find_failed(proof):
                if not self._relax(failed):
                    self._drop(failed.choice, failed.reason)
        if not self.state.kept:
            return None, None
        final = self._final_comparison()
        if final is None or final.comparison.verdict != "faster":
            self._give_back(final)
            return self._for_memory(proof, final)
        return proof, final

    def _for_memory(self, proof: Proof | None, final: Pairing | None) -> tuple[Proof | None, Pairing | None]:
        """What is left when nothing is faster: levers that save memory, if their numbers hold without the others."""
        if not self.state.kept:
            return None, None
        if len(self.state.kept) < self._proved:
            proof = self._prover.prove(self.state.kept)
            if not proof.holds:
                for choice in list(self.state.kept):
                    self._drop(choice, proof.reason)
                return None, None
            final = self._final_comparison() or final
        return proof, final

    def _give_back(self, final: Pairing | None) -> None:
        """No gain in time that could not be shown in fresh processes goes into a plan."""
        reason = f"faster in the search, but the whole could not be measured {self.trials.afresh}"
        if final is not None:
            found = final.comparison
            between = f", {found.low:.2f} to {found.high:.2f}" if found.has_interval else ""
            reason = (
                f"faster in the search, but the whole was not {self.trials.afresh} "
                f"(x{found.ratio:.2f}{between}, {found.verdict})"
            )
        self._proved = len(self.state.kept)
        given_back = [choice for choice in self.state.kept if choice not in self.state.for_memory]
        self.state.kept = [choice for choice in self.state.kept if choice in self.state.for_memory]
        self.state.take_back(given_back, "dropped", reason)

    def _find_failed(self, proof: Proof) -> list[FailedClaim]:
        """The first lever with which the numbers go wrong, by halves: of those that made the claim that failed, over
        growing prefixes, on top of all that made a stricter one. All suspects, where time is too short to tell."""
        failed = proof.claims[-1]
        suspects = [choice for choice in self.state.kept if choice.label in failed.levers]
        sound = {label for claim in proof.claims[:-1] for label in claim.levers}
        low, high, last = 0, len(suspects), proof  # the first `low` hold, the first `high` do not
        while high - low > 1:
            if not self._prover.has_time_for(1):
                told = f"{last.reason} (one of {high - low}; no time was left to find which)"
                return [FailedClaim(choice, told, may_be_reduced=False) for choice in suspects[low:]]
            middle = (low + high) // 2
            self._progress(f"the numbers are off; which lever is it? ({high - low} left)")
            tried = [c for c in self.state.kept if c.label in sound or c in suspects[:middle]]
            partial = self._prover.prove(tried)
            if partial.holds:
                low = middle
            else:
                high, last = middle, partial
        return [FailedClaim(suspects[high - 1], last.reason, last.claims[-1].may_be_reduced)]

    def _relax(self, failed: FailedClaim) -> bool:
        """Relax its claim to 'reduced' where that is allowed, may hold, and there is time to prove it; True if so.

        A kernel that adds up in another order can be far less exact than another one (batch norm over channels_last
        on a CPU): more than rounding, but less than 16-bit products.
        """
        choice = failed.choice
        if not failed.may_be_reduced or self._exactness != "reduced" or choice.relaxed:
            return False
        others = any(one.exactness == "reduced" for one in self.state.kept)  # then these runs are made in any case
        if not others and not self._prover.has_time_for(RUNS_TO_PROVE_REDUCED):
            return False
        weaker = replace(choice, relaxed=True)
        for choices in (self.state.kept, self.state.for_memory):
            choices[:] = [weaker if one == choice else one for one in choices]
        self.state.trials = [
            replace(trial, exactness="reduced", reason=f"beyond rounding: {failed.reason}; {trial.reason}")
            if trial.outcome == "kept" and choice.field in trial.choices
            else trial
            for trial in self.state.trials
        ]
        return True

    def _drop(self, dropped: Choice, reason: str) -> None:
        self.state.kept = [choice for choice in self.state.kept if choice != dropped]
        self.state.take_back([dropped], "failed", f"numbers: {reason}")
        if self.state.fit is not None and dropped.choices in [one.choices for one in self.state.fit.choices]:
            self._fit_without(dropped, self.state.fit)

    def _fit_without(self, dropped: Choice, fit: Fit) -> None:
        """The next combination that makes steps fit takes the place of the one that needs this choice."""
        state, left = self.state, fit.without(dropped)
        before, now = ({one.field for one in found.choices} for found in (fit, left))
        rest = [choice for choice in state.kept if choice.field in before]
        state.take_back(rest, "dropped", f"it was there to fit together with {dropped.label}")
        others = [choice for choice in state.kept if choice not in rest]
        replaced = [choice for choice in others if choice.field in now]
        state.take_back(replaced, "dropped", "another value of it makes a step fit")
        state.kept = in_order([*(choice for choice in others if choice not in replaced), *left.choices])
        state.for_memory, state.fit = list(left.choices), left
        wanted = {choice.field: choice.value for choice in left.choices}
        reason = "the fastest that fits, of those whose numbers hold"
        found = [trial for trial in fit.trials if left.choices and trial.choices == wanted]
        state.trials += [replace(trial, outcome="kept", reason=reason) for trial in found]

    def whole_run(self, final: Pairing | None) -> WholeRun | None:
        """What the plan is worth with its start-up; None where nothing was kept."""
        if final is None or not self.state.kept:
            return None
        with self._deadline.stage("timing how flatout run starts"):
            own_seconds = own_start_seconds(self.trials.work_folder)
        few = self.state.few_steps
        return whole_run(
            own_start_seconds=own_seconds,
            lever_start_seconds=final.startup_seconds,
            script_start_seconds=self.state.startup_seconds or 0.0,
            plain_step_seconds=final.baseline_seconds,
            planned_step_seconds=final.candidate_seconds,
            steps=self.state.total_steps,
            steps_at_start=0 if few is None else few.steps - few.compared,
        )

    def _final_comparison(self) -> Pairing | None:
        self._progress(f"measuring the winner against the plain {self.trials.kind}, {self.trials.afresh}")
        load = LoadWatch()
        pace = Pace.for_step(self.state.first_observed.step_seconds or 0.01, seconds=self._comparison_seconds)
        pace = pace.within(self.state.total_steps)
        try:
            return compare_in_fresh_processes(
                self._compared, self.state.kept, pace, self._deadline, self._comparison_seconds, self.state.few_steps
            )
        except TrialError as error:
            self.warnings.append(f"the last comparison {self.trials.afresh} was cut short: {error}")
            return None
        finally:
            self.warnings += busy(load, "the last comparison")


def _pattern(state: SearchState) -> Pattern:
    seen = state.first_observed
    batches = next((loader.batches_per_epoch for loader in seen.loaders if loader.batches_per_epoch), None)
    return Pattern(
        step_seconds=seen.step_seconds or 0.01,
        startup_seconds=state.restart_seconds,
        levers_start_seconds=sum(_starts_again_in(choice, state) for choice in state.kept),
        total_steps=state.total_steps,
        few=state.few_steps,
        epoch_steps=max(1, round(batches / max(1.0, seen.backwards_per_step or 1.0))) if batches else None,
    )


def _starts_again_in(choice: Choice, state: SearchState) -> float:
    """Seconds that a lever takes to start in a later process, where what it compiled is in the cache."""
    trial = state.kept_trial(choice.field)
    seconds = 0.0 if trial is None else trial.startup_seconds or 0.0
    return seconds * (COMPILED_AGAIN if choice.lever.compiles else 1.0)


def busy(load: LoadWatch, when: str) -> list[str]:
    """Levers that help on a machine that others use (fewer threads, say) need not help on a quiet one."""
    found = load.read()
    if found is None or not found.contended:
        return []
    return [
        f"others kept {found.others_cores:.1f} of {found.logical_cores} cores busy during {when}: "
        "this holds for such a machine; tune again when it is quiet"
    ]
