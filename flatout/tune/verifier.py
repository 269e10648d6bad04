"""Fresh processes decide about what a search has kept: are the numbers right, and is it really faster?

What fails is taken out: the guilty lever where the numbers are off, everything where the whole is not faster.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from flatout.errors import TrialError
from flatout.levers.lever import Choice
from flatout.timing import LoadWatch
from flatout.tune.deadline import Deadline
from flatout.tune.last_comparison import WANTED_PROCESS_PAIRS, compare_in_fresh_processes
from flatout.tune.prover import Pattern, Prover
from flatout.tune.search import SearchState
from flatout.tune.trial import Proof
from flatout.tune.trial_process import TrialSetup
from flatout.tune.whole_run import WholeRun, own_start_seconds, whole_run
from flatout.tune.windows import Pace, Pairing

COMPARISON_SHARE, LEAST_COMPARISON_SECONDS = 0.25, 5.0
"""Of the time that is left for the verifier, for the last comparison."""

Progress = Callable[[str], None]


class Verifier:
    """Proves and measures `state.kept` before `deadline`, and takes out of it what does not hold."""

    def __init__(self, setup: TrialSetup, state: SearchState, deadline: Deadline, progress: Progress) -> None:
        self.setup, self.state, self._deadline, self._progress = setup, state, deadline, progress
        self._comparison_seconds = max(LEAST_COMPARISON_SECONDS, COMPARISON_SHARE * deadline.seconds_left)
        self.warnings: list[str] = []
        starts_seconds = WANTED_PROCESS_PAIRS * (state.startup_seconds or 0.0)  # both of a pair start at once
        before = deadline.reserving(self._comparison_seconds + starts_seconds)
        self._prover = Prover(setup, _pattern(state), before, progress)
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
            for choice, reason in self._find_guilty(proof):
                self._take_back(choice, reason)
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
                    self._take_back(choice, proof.reason)
                return None, None
            final = self._final_comparison() or final
        return proof, final

    def _give_back(self, final: Pairing | None) -> None:
        """No gain in time that could not be shown in fresh processes goes into a plan."""
        reason = "faster in the search, but the whole could not be measured in fresh processes"
        if final is not None:
            found = final.comparison
            between = f", {found.low:.2f} to {found.high:.2f}" if found.has_interval else ""
            reason = (
                "faster in the search, but the whole was not in fresh processes "
                f"(x{found.ratio:.2f}{between}, {found.verdict})"
            )
        lasting = {choice.field for choice in self.state.for_memory}
        self._proved = len(self.state.kept)
        self.state.kept = [choice for choice in self.state.kept if choice in self.state.for_memory]
        self.state.trials = [
            replace(trial, outcome="dropped", reason=reason)
            if trial.outcome == "kept" and not set(trial.plan_field.split("+")) <= lasting
            else trial
            for trial in self.state.trials
        ]

    def _find_guilty(self, proof: Proof) -> list[tuple[Choice, str]]:
        """The first lever with which the numbers go wrong, by halves: of those that made the claim that failed, over
        growing prefixes, on top of all that made a stricter one. All suspects, where time is too short to tell."""
        failed = proof.claims[-1]
        suspects = [choice for choice in self.state.kept if choice.label in failed.levers]
        sound = {label for claim in proof.claims[:-1] for label in claim.levers}
        low, high, reason = 0, len(suspects), proof.reason  # the first `low` hold, the first `high` do not
        while high - low > 1:
            if not self._prover.affords_another:
                return [
                    (choice, f"{reason} (one of {high - low}; no time was left to find which)")
                    for choice in suspects[low:]
                ]
            middle = (low + high) // 2
            self._progress(f"the numbers are off; which lever is it? ({high - low} left)")
            tried = [c for c in self.state.kept if c.label in sound or c in suspects[:middle]]
            partial = self._prover.prove(tried)
            if partial.holds:
                low = middle
            else:
                high, reason = middle, partial.reason
        return [(suspects[high - 1], reason)]

    def _take_back(self, guilty: Choice, reason: str) -> None:
        self.state.kept = [choice for choice in self.state.kept if choice != guilty]
        self.state.trials = [
            replace(trial, outcome="failed", reason=f"numbers: {reason}")
            if trial.outcome == "kept" and guilty.field in trial.plan_field.split("+")
            else trial
            for trial in self.state.trials
        ]

    def whole_run(self, final: Pairing | None) -> WholeRun | None:
        """What the plan is worth with its start-up; None where nothing was kept."""
        if final is None or not self.state.kept:
            return None
        with self._deadline.stage("timing how flatout run starts"):
            own_seconds = own_start_seconds(self.setup.work_folder)
        return whole_run(
            own_start_seconds=own_seconds,
            lever_start_seconds=final.startup_seconds,
            script_start_seconds=self.state.startup_seconds or 0.0,
            plain_step_seconds=final.baseline_seconds,
            planned_step_seconds=final.candidate_seconds,
            steps=self.state.total_steps,
        )

    def _final_comparison(self) -> Pairing | None:
        self._progress("measuring the winner against the plain script, in fresh processes")
        load = LoadWatch()
        pace = Pace.for_step(self.state.first_observed.step_seconds or 0.01, seconds=self._comparison_seconds)
        pace = pace.within(self.state.total_steps)
        try:
            return compare_in_fresh_processes(
                self.setup, self.state.kept, pace, self._deadline, self._comparison_seconds
            )
        except TrialError as error:
            self.warnings.append(f"the last comparison in fresh processes was cut short: {error}")
            return None
        finally:
            self.warnings += busy(load, "the last comparison")


def _pattern(state: SearchState) -> Pattern:
    seen = state.first_observed
    batches = next((loader.batches_per_epoch for loader in seen.loaders if loader.batches_per_epoch), None)
    return Pattern(
        step_seconds=seen.step_seconds or 0.01,
        startup_seconds=state.startup_seconds or 0.0,
        total_steps=state.total_steps,
        epoch_steps=max(1, round(batches / max(1.0, seen.backwards_per_step or 1.0))) if batches else None,
    )


def busy(load: LoadWatch, when: str) -> list[str]:
    """Levers that help on a machine that others use (fewer threads, say) need not help on a quiet one."""
    found = load.read()
    if found is None or not found.contended:
        return []
    return [
        f"others kept {found.others_cores:.1f} of {found.logical_cores} cores busy during {when}: "
        "this holds for such a machine; tune again when it is quiet"
    ]
