"""Verify what a search has kept, in new processes: are the numbers right, and is it really faster?

What fails is removed: the lever at fault where the numbers are wrong, everything where the whole is not faster.
"""

from __future__ import annotations

from dataclasses import replace

from flatout.errors import ScriptError, TrialError
from flatout.levers.catalogue import in_order
from flatout.levers.first_compilation import seconds_to_compile_again
from flatout.levers.lever import Choice, graph_of, split_by_switch
from flatout.plan_choices import Exactness
from flatout.search.deadline import Deadline
from flatout.search.search import Progress
from flatout.search.trial import Trial
from flatout.timing import LoadWatch
from flatout.tuning import last_comparison, prover
from flatout.tuning.fitting import Fit
from flatout.tuning.last_comparison import PlainAndPlanned, Started, compare_afresh, not_confirmed, trials_as_used
from flatout.tuning.prover import Pattern, Prover
from flatout.tuning.results import Proof, SearchState
from flatout.tuning.trials import Trials, restart_seconds
from flatout.tuning.windows import FewSteps, Pace, Pairing
from flatout.units import format_seconds

COMPARISON_SHARE, LEAST_COMPARISON_SECONDS = 0.25, 5.0
"""Of the verifier's time, for the last comparison; up to twice that where needed, or what a short proof leaves: without
a conclusive comparison, everything that was found is dropped."""
PROOF_MARGIN = 1.5
"""Times the minimum of a proof."""
MOST_OF_PROOF = last_comparison.LEAST_PROCESS_PAIRS
"""Pairs of its processes that can be compared: it runs a 'reduced' plan twice, and the plain script."""
KEEPING_MARGIN = 2.0
"""Times the expected length of the last comparison: where there is less, processes of the proof stay for it. Pairs of
new processes took up to twice as long as the restarts of a search let expect."""
STEPS_SHARE = 0.4
"""Share of the whole budget that a search reserves at most for the verifier's steps, besides its starts."""

RUNS_TO_PROVE_REDUCED = 2
"""A run at the plain run's check steps, and a free one."""
TYPICAL_SHARE = 0.8
"""Of a mean step: where the median is shorter, plain and planned, it says little of a run."""


def least_seconds(
    step_seconds: float,
    state: SearchState,
    trials: Trials,
    budget_seconds: float,
    steps_share: float = STEPS_SHARE,
    of_proof: int = 1,
) -> float:
    """What a search must leave for proof and last comparison. steps_share: of the budget, reserved for steps at
    most. of_proof: pairs of processes of the proof that are compared as well."""
    few, compared = state.few_steps, trials_as_used(trials, state.few_steps)
    proofs = of_proof if _proof_can_be_compared(trials, few) else 0
    proved = trials if proofs < MOST_OF_PROOF else compared
    proved_start, compared_start = (restart_seconds(one, state.startup_seconds) for one in (proved, compared))
    starts, whole = (
        prover.least_seconds(Pattern(step_seconds=seconds, start_seconds=proved_start, few=few), proved)
        + last_comparison.least_seconds(seconds, compared_start, compared, few=few, started_pairs=proofs)
        for seconds in (0.0, step_seconds)
    )
    if few is not None:  # runs cannot be shortened: a budget that is too short for them is rejected
        return whole
    return starts + min(whole - starts, steps_share * budget_seconds)


def pairs_of_proof(step_seconds: float, start_seconds: float) -> int:
    """How many pairs of its processes to compare where there is no time for new ones. Several are to be all that is
    compared, so they must be no forks; where steps are short, starting them like that costs more than it saves."""
    return MOST_OF_PROOF if prover.LEAST_STEPS * step_seconds >= start_seconds else 1


def _proof_can_be_compared(trials: Trials, few: FewSteps | None) -> bool:
    """Can its processes be compared, where there is no time for more new ones? A proof of a TrainStep makes copies in
    one process, and one of whole runs ends them."""
    return few is None and trials.kind == "script"


class Verifier:
    """Proves and measures `state.kept` before `deadline`, and removes what fails."""

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
        share, pattern = COMPARISON_SHARE * deadline.seconds_left, _pattern(state, trials)
        few, proofs = state.few_steps, int(_proof_can_be_compared(trials, state.few_steps))
        self._compared = trials_as_used(trials, few)
        starts = restart_seconds(self._compared, state.startup_seconds), self._compared, _levers_start_seconds(state)

        def compared_seconds(process_pairs: int, started: int) -> float:
            return last_comparison.least_seconds(pattern.step_seconds, *starts, few, process_pairs, started)

        least = compared_seconds(last_comparison.LEAST_PROCESS_PAIRS, proofs)
        needed = compared_seconds(last_comparison.WANTED_PROCESS_PAIRS, 0)
        beside_proof = self._claim_what_there_is_time_for(pattern, least)
        self._comparison_seconds = max(LEAST_COMPARISON_SECONDS, share, min(needed, max(2 * share, beside_proof)))
        self.warnings: list[str] = []
        before = deadline.reserving(self._comparison_seconds)
        latest = deadline.reserving(least - last_comparison.LEAST_SHARE_BEYOND * deadline.budget_seconds)
        # They take memory while others run, so they stay only where time may be too short for pairs of new ones.
        keeps = bool(proofs) and state.first_observed.device == "cpu" and beside_proof < KEEPING_MARGIN * needed
        several = keeps and beside_proof < least and any(choice.exactness == "reduced" for choice in state.kept)
        wanted = pairs_of_proof(pattern.step_seconds, starts[0]) if several else int(keeps)
        if wanted == MOST_OF_PROOF:
            trials = trials.in_new_processes()
            pattern = replace(pattern, start_seconds=restart_seconds(trials, state.startup_seconds))
        self._prover = Prover(trials, pattern, before, progress, latest)
        self._prover.keeps_pairs = wanted

    def _claim_what_there_is_time_for(self, pattern: Pattern, comparison_seconds: float) -> float:
        """Seconds left beside the proof of what is claimed after this.

        The proof judges stricter claims without the 'reduced' levers. Where those change what is compiled, this takes
        a compilation that no trial has made. Where there is no time for it before the last comparison, the compiled
        model claims 'reduced' too, and is proved with the others.
        """

        def beside_proof() -> float:
            claims = {choice.exactness for choice in self.state.kept}
            return self._deadline.seconds_left - PROOF_MARGIN * prover.least_seconds(pattern, self.trials, claims)

        reduced = [choice for choice in self.state.kept if choice.exactness == "reduced"]
        stricter = graph_of([choice for choice in self.state.kept if choice not in reduced])
        if stricter is None or stricter in self.state.compiled_graphs:
            return beside_proof()
        compiled = next(choice for choice in self.state.kept if choice.lever.compiles)
        trial = self.state.kept_trial(compiled.field)
        seconds = (trial and trial.startup_seconds) or 0.0
        if beside_proof() - seconds < comparison_seconds:
            names = ", ".join(choice.label for choice in reduced)
            self._claim_reduced(compiled, f"proved with {names}: compiling it without takes {format_seconds(seconds)}")
        return beside_proof()

    def run(self) -> tuple[Proof | None, Pairing | None]:
        """What is left where nothing is faster, memory levers, is proved and measured without the others."""
        with self._prover:
            while (proof := self._proof_of_kept()) is not None:
                final = self._final_comparison()
                if (final is not None and final.comparison.verdict == "faster") or not self._give_back(final):
                    self.warnings += [] if final is None else gain_of_all_steps(final)
                    return proof, final
        return None, None

    def _proof_of_kept(self) -> Proof | None:
        """Of what is still kept after it; None: nothing is."""
        while self.state.kept:
            proof = self._prover.prove(self.state.kept)
            if proof.holds:
                return proof
            for choice, reason, may_be_reduced in self._find_failed(proof):
                if not (may_be_reduced and self._relax(choice, reason)):
                    self._drop(choice, reason)
        return None

    def _give_back(self, final: Pairing | None) -> bool:
        """A speedup that could not be reproduced in new processes does not go into a plan. True if anything did not."""
        reason = f"faster in the search, but the plan could not be measured {self.trials.afresh}"
        if final is not None:
            reason = f"faster in the search, {not_confirmed(final.comparison, self.trials.afresh)}"
        given_back = [choice for choice in self.state.kept if choice not in self.state.for_memory]
        self.state.kept = [choice for choice in self.state.kept if choice in self.state.for_memory]
        self.state.take_back(given_back, "dropped", reason)
        return bool(given_back)

    def _find_failed(self, proof: Proof) -> list[tuple[Choice, str, bool]]:
        """(a lever that changes the numbers by more than it claims, why, may it be 'reduced' by its check steps?)

        Bisect for the first lever with which the numbers go wrong: over prefixes of the levers with the failed
        claim, on top of all those with a stricter one. All candidates, where time is too short to find out: whether
        they may be reduced was seen of all of them together."""
        failed = proof.claims[-1]
        suspects = [choice for choice in self.state.kept if choice.label in failed.levers]
        sound = {label for claim in proof.claims[:-1] for label in claim.levers}
        low, high, last = 0, len(suspects), proof  # the first `low` pass, the first `high` do not
        while high - low > 1:
            if not self._prover.has_time_for(1):
                reason = f"{last.reason} (one of {high - low}; no time was left to find out which)"
                may_be_reduced = last.claims[-1].may_be_reduced
                return [(choice, reason, may_be_reduced) for choice in suspects[low:high]]
            middle = (low + high) // 2
            self._progress(f"the numbers are wrong; finding the lever ({high - low} left)")
            tried = [c for c in self.state.kept if c.label in sound or c in suspects[:middle]]
            partial = self._prover.prove(tried)
            if partial.holds:
                low = middle
            else:
                high, last = middle, partial
        return [(suspects[high - 1], last.reason, last.claims[-1].may_be_reduced)]

    def _relax(self, choice: Choice, reason: str) -> bool:
        """Relax its claim to 'reduced' where that is allowed, and there is time to prove it; True if so.

        A kernel that sums in another order can be far less accurate (batch norm over channels_last on a CPU): worse
        than rounding, but better than 16-bit products.
        """
        if self._exactness != "reduced" or choice.relaxed:
            return False
        others = any(one.exactness == "reduced" for one in self.state.kept)  # then these runs happen anyway
        if not others and not self._prover.has_time_for(RUNS_TO_PROVE_REDUCED):
            return False
        self._claim_reduced(choice, f"beyond rounding: {reason}")
        return True

    def _claim_reduced(self, choice: Choice, reason: str) -> None:
        weaker = replace(choice, relaxed=True)
        for choices in (self.state.kept, self.state.for_memory):
            choices[:] = [weaker if one == choice else one for one in choices]

        def relaxed(trial: Trial) -> Trial:
            if trial.outcome != "kept" or choice.field not in trial.choices:
                return trial
            known = trial.reason.startswith(reason)  # of another choice that was tried with it
            return replace(trial, exactness="reduced", reason=trial.reason if known else f"{reason}; {trial.reason}")

        self.state.trials = [relaxed(trial) for trial in self.state.trials]

    def _drop(self, dropped: Choice, reason: str) -> None:
        self.state.kept = [choice for choice in self.state.kept if choice != dropped]
        self.state.take_back([dropped], "failed", f"numbers: {reason}")
        if self.state.fit is not None and dropped.choices in [one.choices for one in self.state.fit.choices]:
            self._fit_without(dropped, self.state.fit)
        self._keep_displaced(dropped)

    def _keep_displaced(self, dropped: Choice) -> None:
        """Keep again what was dropped because of this choice, if there is time to prove it."""
        taken = {choice.field for choice in self.state.kept}
        wrong = [trial.choices for trial in self.state.trials if trial.outcome == "failed"]
        of_field = {
            choice.field: choice
            for choice, others in self.state.displaced
            if choice.field not in taken and dropped.choices in [other.choices for other in others]
            if choice.choices not in wrong
        }
        again = list(of_field.values())
        if again and self._prover.has_time_for(1):
            self.state.kept = in_order([*self.state.kept, *again])
            self.state.keep_again(again, f"faster; needed again without {dropped.label}")

    def _fit_without(self, dropped: Choice, fit: Fit) -> None:
        """Replace the combination that needs this choice by the next one that fits."""
        state, left = self.state, fit.without(dropped)
        before, now = ({one.field for one in found.choices} for found in (fit, left))
        rest = [choice for choice in state.kept if choice.field in before]
        state.take_back(rest, "dropped", f"it was kept to fit together with {dropped.label}")
        others = [choice for choice in state.kept if choice not in rest]
        replaced = [choice for choice in others if choice.field in now]
        state.take_back(replaced, "dropped", "another value of it makes a step fit")
        state.kept = in_order([*(choice for choice in others if choice not in replaced), *left.choices])
        state.for_memory, state.fit = list(left.choices), left
        wanted = {choice.field: choice.value for choice in left.choices}
        reason = "the fastest that fits, of those whose numbers hold"
        found = [trial for trial in fit.trials if left.choices and trial.choices == wanted]
        state.trials += [replace(trial, outcome="kept", reason=reason) for trial in found]

    def _final_comparison(self) -> Pairing | None:
        self._progress(f"measuring the plan against the plain {self.trials.kind}, {self.trials.afresh}")
        load = LoadWatch()
        pace = Pace.for_step(self.state.first_observed.step_seconds or 0.01, seconds=self._comparison_seconds)
        pace = pace.within(self.state.total_steps)
        of_proof = self._prover.arms(self.state.kept)
        started = Started(
            pairs=of_proof,
            startup_seconds=_levers_start_seconds(self.state),
            come_first=len(of_proof) == MOST_OF_PROOF,
        )
        try:
            return compare_afresh(
                PlainAndPlanned(self._compared, self.state.kept),
                pace,
                self._deadline,
                self._comparison_seconds,
                self.state.few_steps,
                started,
                self._progress,
            )
        except (TrialError, ScriptError) as error:
            self.warnings.append(f"the last comparison {self.trials.afresh} was cut short: {error}")
            return None
        finally:
            self.warnings += busy(load, "the last comparison")


def _pattern(state: SearchState, trials: Trials) -> Pattern:
    seen = state.first_observed
    batches = next((loader.batches_per_epoch for loader in seen.loaders if loader.batches_per_epoch), None)
    plain_seconds = restart_seconds(trials, state.startup_seconds)
    planned_seconds = restart_seconds(trials, state.startup_seconds, split_by_switch(state.kept)[0])
    return Pattern(
        step_seconds=seen.step_seconds or 0.01,
        start_seconds=plain_seconds,
        levers_start_seconds=planned_seconds - plain_seconds + _levers_start_seconds(state),
        total_steps=state.total_steps,
        few=state.few_steps,
        epoch_steps=max(1, round(batches / max(1.0, seen.backwards_per_step or 1.0))) if batches else None,
    )


def _levers_start_seconds(state: SearchState) -> float:
    """What turning them on takes in a later process, where what they compiled is cached."""
    total = 0.0
    for choice in state.kept:
        trial = state.kept_trial(choice.field)
        seconds = (trial and trial.startup_seconds) or 0.0
        total += seconds_to_compile_again(seconds) if choice.lever.compiles else seconds
    return total


def gain_of_all_steps(final: Pairing) -> list[str]:
    """A warning where the gain of a typical step, the median, is not that of a run, as some steps take far longer."""
    if final.mean_seconds is None:
        return []
    plain, planned = final.mean_seconds
    uneven = final.baseline_seconds < TYPICAL_SHARE * plain and final.candidate_seconds < TYPICAL_SHARE * planned
    gain, of_typical = plain / planned, final.comparison.ratio
    if not uneven or gain - 1 > (of_typical - 1) / 2:
        return []
    return [
        f"x{of_typical:.2f} is the gain of a typical step; some take far longer (waiting for data, evaluation, "
        f"checkpoints): the mean of all steps in the last comparison was x{gain:.2f} as fast"
    ]


def busy(load: LoadWatch, when: str) -> list[str]:
    """A warning where the machine was busy: levers that help there (fewer threads) may not help on an idle one."""
    found = load.read()
    if found is None or not found.contended:
        return []
    return [
        f"other processes kept {found.others_cores:.1f} of {found.logical_cores} cores busy during {when}: "
        "the result holds for a machine under that load; tune again when it is idle"
    ]
