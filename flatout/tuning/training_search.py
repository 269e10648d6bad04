"""The search for levers that speed up training, of a script or a TrainStep; in one live process where possible.

The lever with the largest expected saving per second of trial comes first, as levers predict and earlier tunes
measured. A lever is switched on and off between windows of steps; one that must be on from the start gets a process of
its own; where a script has few steps, whole runs are compared (`few_steps`). See `flatout.search`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace

from flatout.errors import ScriptError, TrialError
from flatout.levers.catalogue import in_order
from flatout.levers.first_compilation import seconds_to_compile_again, usual_compile_seconds
from flatout.levers.lever import Choice, Lever, Saving, graph_of, split_by_switch
from flatout.levers.observed import Observed
from flatout.machine.description import Machine
from flatout.script.trial.answers import Peak, TrialEnded, TrialHangs, TrialStopped, explain_end, explain_stop
from flatout.script.trial.setup import mostly_waited
from flatout.search.deadline import BudgetSpent
from flatout.search.search import BUSY_FROM, Progress, Proposal, Search
from flatout.search.trial import Measured, Trial
from flatout.statistics import Comparison
from flatout.terminal import Notice
from flatout.tuning.fitting import Fit, combinations, fit, judge_gain
from flatout.tuning.history import History, Training
from flatout.tuning.proposals import COMPARISON_SECONDS, TRIALS_COST, Proposals, SearchLimits, least_trial_seconds
from flatout.tuning.results import SearchState
from flatout.tuning.short_budget import no_step, too_few_to_fit, too_slow, too_slow_for_whole_runs
from flatout.tuning.trials import RunningTrial, Trials, once_more_if_ended, restart_seconds
from flatout.tuning.verifier import STEPS_SHARE, least_seconds, pairs_of_proof
from flatout.tuning.windows import (
    FEWEST_STEPS,
    WANTED_PAIRS,
    Arm,
    FewSteps,
    Pace,
    Pairing,
    RolledBackInside,
    compare_arms,
    compare_whole_runs,
    few_steps,
    pace_within,
)
from flatout.units import counted, format_bytes, format_seconds

OBSERVED_STEPS = 30
COMPILED_AGAIN_BY = 3
"""Processes of the verifier that compile again at least: two in the proof, one in the last comparison."""
WHILE_NOTHING_IS_KEPT = 1.5
"""Times the verifier's minimum: what is reserved for it while nothing is kept."""
MOST_OVER, WATCHED_STEPS, TRIALS_WANTED = 2.5, 4, 2
"""Times the budget: how much longer a tune of long steps may take, which is said as soon as it is known. The steps that
are watched before its first trial. And its trials, where the budget has room for them: one alone may stay undecided."""
FIRST_STEPS_SHARE, MOST_FIRST_STEPS = 0.05, 4
"""Share of the budget spent on timing more first steps, and how many, before a budget is rejected as too short."""
OBSERVATION_SHARE = 0.1
MOST_WATCHED_AGAIN = 2
"""How often plain steps are watched again: watching itself may slow down short ones."""
LEAST_PATIENCE_SECONDS = 60.0
"""Timeout for a script without a step: loading torch alone takes seconds, many on a busy machine."""
SLOWER_START = 3.0
"""Times the first start: timeout of a later one, under a lever or on a machine that has become busy."""
MUCH_SAVED = 0.05
"""Share of a step: what is expected to save this is tried while there is time for it."""
SHARE_SECONDS = 3.0
"""Least time for the windows of one comparison."""
LONGEST_SHARES = 3.0
"""Times its share: the time for a comparison in which the candidate looks faster. A gain that is dropped for lack of
pairs has cost its trial, and levers that recompile are not tried again once a model is compiled."""
LONGEST_OF_A_BUNDLE = 0.8
"""Of the time that is left, for a bundle that looks faster: without a verdict its members would be tried one by one, in
less time and each for a smaller gain. On a busy machine six pairs of a bundle of x2.3 held anything from 0.5 to 3.4."""
LONGER_TRIAL = 2.0
"""How much longer than those before a trial may take."""
SHARE_TO_TRY_AGAIN = 0.1
"""Of the time that is left, for trying without forks what failed in one."""
MOST_RESTARTS = 60
ATTEMPTS = 6
"""Starts of a short script within one comparison."""


class TrainingSearch(Search[Choice]):
    """One search over `levers` for one script or step. `run` returns the state; `close` ends its process."""

    state: SearchState

    def __init__(
        self,
        trials: Trials,
        machine: Machine,
        levers: Sequence[Lever],
        limits: SearchLimits,
        progress: Progress = lambda text: None,
        history: History | None = None,
    ) -> None:
        super().__init__(SearchState(total_steps=limits.total_steps), limits.deadline, progress)
        self.trials = trials
        self.machine, self.levers, self.limits = machine, levers, limits
        self._history = history or History()
        self._proposals = Proposals(
            levers, machine, self.state, limits, trials.kind, self._history, self._restart_seconds
        )
        self._process: RunningTrial | None = None
        self._process_has: list[Choice] = []
        """The choices on from the start of that process."""
        self._restarts = 0
        self._compile_seconds = 0.0
        """Compilation time of what is kept."""
        self._left_for_verifier: float | None = None
        """Seconds that are kept back for a verifier that may take longer than the budget; None: it may not."""
        self._length: int | None = None
        """Steps of a script that has ended."""
        self._watched_again = 0
        self._to_note: list[tuple[Trial, Training]] = []
        """For later tunes."""

    @property
    def total(self) -> int | None:
        return self.state.total_steps

    @property
    def first_seconds(self) -> float | None:
        return self.state.first_observed.step_seconds

    @property
    def pairs_of(self) -> str:
        return "windows" if self.few is None else "whole runs"

    @property
    def few(self) -> FewSteps | None:
        return self.state.few_steps

    @property
    def usual_trial_seconds(self) -> float:
        if self.few is not None:
            return self.few.least_seconds(self.first_seconds or 0.0, self._restart_seconds())
        return least_trial_seconds(self.state.first_observed)

    def _restart_seconds(self, choices: Sequence[Choice] = ()) -> float:
        """Of one more trial under these choices."""
        return restart_seconds(self.trials, self.state.startup_seconds, self._from_start(choices))

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    def run(self) -> SearchState:
        try:
            super().run()
        finally:
            busy = self.while_busy()
            for trial, training in self._to_note:
                if trial not in busy:
                    self._history.note(trial, training)
        return self.state

    # what is proposed

    def names(self) -> Sequence[str]:
        return self._proposals.names()

    def proposal(self, name: str) -> Proposal[Choice]:
        found = self._proposals.proposal(name)
        in_time_first = sorted(found.candidates, key=self._is_too_late_for)
        return replace(found, candidates=tuple(in_time_first))

    def _is_too_late_for(self, choice: Choice) -> bool:
        return self._remaining() <= self.needed_seconds(self.combined((choice,)))

    def promise(self, name: str) -> tuple[bool, float]:
        return self._is_last_chance(name), self._proposals.promise(name)

    def _is_last_chance(self, name: str, trials: int = 1) -> bool:
        """Is there time for it now, but not after so many other trials, and is it expected to save much, and no less
        than the others that there would be no time for?"""
        candidate = next(iter(self.proposal(name).candidates), None)
        if candidate is None or (saving := self._proposals.saving(candidate).expected) < MUCH_SAVED:
            return False
        needed = self.needed_seconds(self.combined((candidate,)))
        if not needed < self._remaining() < needed + trials * self._another_trial_seconds():
            return False
        return saving >= self._saved_by_others(name, self._remaining()) - self._saved_by_others(
            name, self._remaining() - needed
        )

    def _saved_by_others(self, name: str, seconds: float) -> float:
        """The sum of what is expected to be saved by all but this one that can be tried in this time."""
        others = [one for one in self.names() if one != name and self._open(one)]
        total = 0.0
        for other in sorted(others, key=self._proposals.promise, reverse=True):
            candidate = self._open(other)[0]
            seconds -= TRIALS_COST * self.usual_trial_seconds + self.needed_seconds(self.combined((candidate,)))
            if seconds < 0:
                break
            total += max(0.0, self._proposals.saving(candidate).expected)
        return total

    def _another_trial_seconds(self) -> float:
        """At most, as far as is known."""
        costs = [trial.cost_seconds for trial in self.state.trials]
        return LONGER_TRIAL * max(SHARE_SECONDS, TRIALS_COST * self.usual_trial_seconds, *costs)

    def leaves_time_after(self, trials: int) -> bool:
        return not any(self._is_last_chance(name, trials) for name in self.names())

    def leading(self) -> Sequence[str]:
        return self._proposals.leading()

    def bundle(self) -> tuple[Choice, ...]:
        return self._proposals.bundle(self.usual_trial_seconds, self._remaining())

    def predicted(self, tried: Sequence[Choice]) -> Saving | None:
        return self._proposals.saving(tried[0]) if len(tried) == 1 else None

    def after_trial(self, trial: Trial, tried: Sequence[Choice]) -> None:
        self._to_note.append((trial, self._proposals.training))
        self._watch_again_if_it_was_busy(trial)
        self._keep_back(self.first_seconds or 0.0)  # what was forked has to be started, once a fork has written

    # the process

    def _live(self, choices: Sequence[Choice] | None = None) -> list[Choice]:
        return split_by_switch(self.state.kept if choices is None else choices)[1]

    def _from_start(self, choices: Sequence[Choice] | None = None) -> list[Choice]:
        return split_by_switch(self.state.kept if choices is None else choices)[0]

    def _started(self, choices: Sequence[Choice]) -> RunningTrial:
        process = self.trials.trial(choices)
        process.deadline = self._deadline
        process.expected_step_seconds = self.state.first_observed.step_seconds
        process.interruptible = process.expected_step_seconds is not None  # the plain script always runs to its answer
        process.first_steps_seconds = patience = max(LEAST_PATIENCE_SECONDS, self._remaining())
        try:
            process.start(max(patience, SLOWER_START * (self.state.startup_seconds or 0.0)))
        except BaseException:
            process.close()
            raise
        return process

    def _main(self) -> RunningTrial:
        if self._process is None or not self._process.alive or self._process_has != self._from_start():
            self.close()
            self._restarts += 1
            if self._restarts > MOST_RESTARTS:
                raise TrialError(f"{MOST_RESTARTS} restarts of the script", limit="that is the most")
            self._process_has = self._from_start()
            self._process = self._started(self._process_has)
        return self._process

    # observation

    def observe(self) -> None:
        self._progress(f"starting the {self.trials.kind}")
        try:
            seen = self._watch_plain(OBSERVED_STEPS)
        except TrialError as error:
            if self._goes_on_without_forks(error):
                self.observe()
                return
            seen = self._watch_after(error)
        self.state.observed = self.state.first_observed = seen
        if self.few is not None:  # from here on each run has a process of its own
            return
        main = self._main()
        main.expected_step_seconds, main.interruptible = self.state.observed.step_seconds, True
        if self.limits.fit_bytes is not None:
            self._fit(self.limits.fit_bytes)

    def _goes_on_without_forks(self, error: TrialError) -> bool:
        """False where the error is not one that a fork may have had alone."""
        expected = isinstance(error, BudgetSpent) or (isinstance(error, TrialEnded) and error.by_itself)
        by_themselves = self.trials.from_the_start()
        if expected or by_themselves is self.trials:
            return False
        self.close()
        self.trials = by_themselves
        return True

    def _watch_after(self, error: TrialError) -> Observed:
        """The same as `_watch_plain`, where that ended with an error."""
        if isinstance(error, TrialHangs):
            raise no_step(self.trials.name, error, self.state.startup_seconds, self._deadline) from None
        if not isinstance(error, TrialEnded):
            raise error
        if not error.leaves_enough_steps:
            raise explain_end(error, self.trials.name, levers=True) from None
        self.close()
        try:  # it has ended meanwhile: restart it and watch fewer steps
            if error.steps >= FEWEST_STEPS:
                self._note_length(error, None)
                return self._watch_plain(max(2, error.steps - 10))
            return self._watch_few(error)
        except TrialEnded as again:
            raise explain_end(again, self.trials.name, levers=True) from None

    def _fit(self, limit_bytes: int) -> None:
        """Keep what brings a step under the limit, whatever it costs."""
        seen = self.state.observed
        self.state.fit = found = fit(
            self._main,
            combinations(self.levers, self.machine, seen, self.limits.exactness),
            limit_bytes,
            seen.step_seconds or 0.01,
            lambda: self._remaining() > 0,
            self._progress,
        )
        self.state.trials += [trial for trial in found.trials if trial.outcome == "kept"]
        self.state.kept, self.state.for_memory = list(found.choices), list(found.choices)
        if found.choices:
            self._keep_back(seen.step_seconds or 0.0)
            self._look_again()

    def _watch_few(self, end: TrialEnded) -> Observed:
        """Watch all steps after the first: time those before the last, and count what the last computes."""
        with self._explaining_stops():
            process, described = self._described()
            self._progress(f"watching {end.steps - 1} plain steps")
            seen = _with_work(process.breakdown([], steps=end.steps - 2), process, described)
        self.close()
        step_seconds = seen.step_seconds or 0.0
        self._note_length(end, step_seconds)
        self._keep_back(step_seconds)
        if self.few is None:
            self._affordable_steps(step_seconds)
        elif self.limits.fit_bytes is not None:
            raise too_few_to_fit(self.trials.name, self.few.steps)
        elif (wanted := self.few.least_seconds(step_seconds, self._restart_seconds())) > self._remaining():
            startup, name = self.state.startup_seconds or 0.0, self.trials.name
            raise too_slow_for_whole_runs(name, startup, step_seconds, self.few, wanted, self._deadline)
        return seen

    def _described(self) -> tuple[RunningTrial, Observed]:
        """The process at its first step, and what was observed before anything of ours ran."""
        process = self._main()
        if self._restarts == 1 and mostly_waited(
            process.start_seconds or 0.0, process.waiting_seconds, self._deadline.budget_seconds
        ):
            self._progress("restarting: the first start was mostly waiting")
            self.close()
            process = self._main()
        self.state.isolation = dict(process.isolation)
        self.state.startup_seconds = process.startup_seconds
        self._keep_back(0.0)
        described = process.describe()
        self.state.loop = described.loop
        return process, described

    def _watch_plain(self, steps: int) -> Observed:
        """Watch so many plain steps."""
        with self._explaining_stops():
            process, described = self._described()
            self._progress("timing the first plain steps")
            window = process.window([], settle=int(self._remaining() > 0), steps=1)
            affordable = self._affordable_of_first(process, min(window.settle_seconds + window.seconds))
            steps = min(steps, OBSERVED_STEPS, affordable)
            self._progress(f"watching {steps} plain steps")
            return _with_work(process.breakdown([], steps=steps), process, described)

    def _affordable_of_first(self, process: RunningTrial, step_seconds: float) -> int:
        """Where the budget is too short for steps as long as the first, time a few more: first steps allocate, and
        caches are cold."""
        self._keep_back(step_seconds)
        fitting = int(FIRST_STEPS_SHARE * self._deadline.budget_seconds / step_seconds)
        one = step_seconds <= self._deadline.whole_seconds_left  # a script may do more in its first steps
        more = max(one, min(MOST_FIRST_STEPS, fitting))
        if more and self._fewest_steps(step_seconds) * step_seconds > self._remaining():
            step_seconds = min(process.window([], settle=0, steps=more).seconds)
            self._keep_back(step_seconds)
        if self._fewest_steps(step_seconds) * step_seconds > self._remaining():
            self._let_verifier_go_over(step_seconds)
        return self._affordable_steps(step_seconds)

    def _let_verifier_go_over(self, step_seconds: float) -> None:
        """Where the budget has room for a trial, but not for the verifier besides: let that take longer. Such
        scripts would be refused otherwise."""
        left, fewest = self._deadline.whole_seconds_left, self._fewest_steps(step_seconds)
        one, wanted = ((WATCHED_STEPS + trials * fewest) * step_seconds for trials in (1, TRIALS_WANTED))
        search = min(left, wanted)
        of_proof = pairs_of_proof(step_seconds, self.state.startup_seconds or 0.0)
        over = search + self._least_for_verifier(step_seconds, steps_share=math.inf, of_proof=of_proof) - left
        if one <= left and over <= MOST_OVER * self._deadline.budget_seconds:
            self._left_for_verifier = left - search
            self._keep_back(step_seconds)
            longer = f"this tune will take about {format_seconds(over)} longer than its budget"
            self._progress(Notice(f"steps of {format_seconds(step_seconds)}: {longer}"))

    @contextlib.contextmanager
    def _explaining_stops(self) -> Iterator[None]:
        try:
            yield
        except TrialStopped as stop:
            raise explain_stop(stop, self.trials.name, str(self.state.isolation.get("reason", ""))) from None

    def _keep_back(self, step_seconds: float) -> None:
        """Reserve more for the verifier where slow starts or long steps make it slow, as a search that leaves no time
        for it is useless; and less while there is nothing to verify."""
        usual, least = self.limits.deadline.reserved_seconds, self._least_for_verifier(step_seconds)
        if self._left_for_verifier is not None and not self.state.kept:
            least = self._left_for_verifier
        else:
            least = max(least, usual if self.state.kept else min(usual, WHILE_NOTHING_IS_KEPT * least))
        before, self._deadline = self._deadline, self.limits.deadline.reserving(least - usual)
        if before.stopped:  # by Ctrl-C, perhaps just now
            self._deadline.stopped = True
        if self._process is not None:
            self._process.deadline = self._deadline

    def _least_for_verifier(
        self,
        step_seconds: float,
        compile_seconds: float | None = None,
        steps_share: float | None = None,
        of_proof: int = 1,
    ) -> float:
        """compile_seconds: None: of what is kept. steps_share: None: the usual one, or what the verifier needs once
        something is kept, which it would have to drop without a conclusive comparison. of_proof: as in
        `least_seconds`."""
        compile_seconds = self._compile_seconds if compile_seconds is None else compile_seconds
        if steps_share is None:
            steps_share = math.inf if self.state.kept else STEPS_SHARE
        budget = self._deadline.budget_seconds
        needed = least_seconds(step_seconds, self.state, self.trials, budget, steps_share, of_proof)
        return needed + COMPILED_AGAIN_BY * seconds_to_compile_again(compile_seconds)

    def _fewest_steps(self, step_seconds: float) -> int:
        """Of a trial."""
        return Pace.for_step(step_seconds, seconds=self._remaining()).least_steps

    def _affordable_steps(self, step_seconds: float) -> int:
        """How many plain steps may be watched; ScriptError where the budget is too short to compare anything."""
        steps = self._fewest_steps(step_seconds)
        if steps * step_seconds > self._remaining():
            startup = self.state.startup_seconds or 0.0
            raise too_slow(self.trials.name, startup, step_seconds, steps, self._deadline)
        return max(2, int(OBSERVATION_SHARE * self._remaining() / step_seconds))

    def _look_again(self) -> None:
        """Observe again after a lever was kept: shares of a step have changed, and a loader lever may have nothing to
        gain."""
        if (seen := self._seen_again(self._live(), self._steps_to_look_again())) is not None:
            self.state.observed = self.state.observed.with_times_of(seen)

    def _seen_again(self, live: Sequence[Choice], steps: int) -> Observed | None:
        """None where the process failed or ended."""
        try:
            if self.few is None:
                return self._main().breakdown(live, steps=steps)
            with self._started(self._from_start()) as fresh:
                return fresh.breakdown(live, steps=self.few.compared)
        except (TrialError, ScriptError):
            self.close()
            return None

    def _watch_again_if_it_was_busy(self, trial: Trial) -> None:
        """Watch plain steps again where those of this trial were far shorter: predictions and the length of windows
        depend on them. Not where what is kept cannot be switched off."""
        process, last = self._process, self.plain_seconds(trial, "high")
        if last is None or (self.first_seconds or 0.0) <= BUSY_FROM * last or self._watched_again >= MOST_WATCHED_AGAIN:
            return
        if process is None or not process.alive or self.few is not None or self._process_has:
            return
        self._watched_again += 1
        self._progress("watching plain steps again, as the machine was busy before")
        if (seen := self._seen_again([], self._steps_to_look_again(last))) is None:
            return
        self.state.first_observed = self.state.first_observed.with_times_of(seen)
        if not self.state.kept:
            self.state.observed = self.state.observed.with_times_of(seen)
        elif trial.outcome != "kept":  # then `on_kept` is about to do it
            self._look_again()

    def _steps_to_look_again(self, step_seconds: float | None = None) -> int:
        affordable = OBSERVATION_SHARE * self._remaining() / (step_seconds or self.state.observed.step_seconds or 0.01)
        return max(2, min(OBSERVED_STEPS // 2, int(affordable)))

    # trials

    def needed_seconds(self, wanted: Sequence[Choice]) -> float:
        if self.few is not None:
            return self.usual_trial_seconds
        fresh = self._process is None or self._from_start(wanted) != self._from_start()
        restart_seconds = self._restart_seconds(wanted) + self.usual_trial_seconds if fresh else 0.0
        compiled = next((one for one in wanted if one.lever.compiles), None)
        new = [one for one in wanted if one not in self.state.kept]
        again = any(one.lever.acts_on_forward or one.lever.recompiles for one in new)
        if self.limits.only is not None or compiled is None:
            return restart_seconds
        if not again:
            return restart_seconds + fresh * seconds_to_compile_again(self._compile_seconds)
        first = usual_compile_seconds(self.state.first_observed, compiled.value)
        later = self._least_for_verifier(self.first_seconds or 0.0, first) - self._deadline.reserved_seconds
        return (restart_seconds or self.usual_trial_seconds) + first + max(0.0, later)

    def ordered(self, wanted: Sequence[Choice]) -> list[Choice]:
        return in_order(wanted)

    def measure(self, wanted: Sequence[Choice], tried: Sequence[Choice]) -> Measured:
        try:
            pairing = self._compare(wanted, tried)
            self.state.compiled_graphs.add(graph_of(wanted))
            found = self._judge(pairing)
            peaks = self._peaks(wanted, tried[-1])
            if found.outcome == "kept" and self.state.fit is not None:
                found = self._within_limit(found, wanted, self.state.fit)
        except BudgetSpent:
            self.close()
            raise
        except (TrialError, ScriptError) as error:
            return self._again_without_forks(error, wanted, tried) or self._failure(error)
        if peaks is None:
            return found
        if found.outcome in ("kept", "dropped"):
            # Also where it is faster: the last comparison may find it slower, and it is kept all the same.
            asked, device = self.limits.only is not None, self.state.observed.device
            outcome, reason = judge_gain(*peaks, tried[-1], self.machine, device, asked=asked)
            if outcome == "kept":
                self.state.for_memory.append(tried[-1])
            if outcome == "kept" or found.outcome == "dropped":
                found = replace(found, outcome=outcome, reason=reason)
        before, after = peaks
        return replace(found, baseline_peak_bytes=before.peak_bytes, candidate_peak_bytes=after.peak_bytes)

    def _again_without_forks(
        self, error: Exception, wanted: Sequence[Choice], tried: Sequence[Choice]
    ) -> Measured | None:
        """What failed in forks, tried in processes that start by themselves: then the forks may be at fault, and are
        not used any more if so. None where that takes much of the time that is left."""
        forked, start_seconds = self.trials, self.state.startup_seconds or 0.0
        if not isinstance(error, TrialError) or 2 * start_seconds > SHARE_TO_TRY_AGAIN * self._remaining():
            return None
        if isinstance(error, RolledBackInside) or not self._goes_on_without_forks(error):
            return None
        found = self.measure(wanted, tried)
        if found.outcome == "failed":
            self.close()
            self.trials = forked
        return found

    def _within_limit(self, found: Measured, wanted: Sequence[Choice], fit: Fit) -> Measured:
        """What is faster must fit as well. Levers that are on from a process's start change no tensor."""
        if self._from_start(wanted) != self._from_start():
            return found
        peak = self._peak(wanted).peak_bytes
        if peak is not None and peak <= fit.limit_bytes:
            return found
        size = "cannot be measured" if peak is None else f"is {format_bytes(peak)}"
        return replace(found, outcome="dropped", reason=f"faster, but the memory of a step {size}")

    def _peaks(self, wanted: Sequence[Choice], choice: Choice) -> tuple[Peak, Peak] | None:
        """Without and with a memory lever; None for any other."""
        if choice.lever.aim != "memory" or choice.lever.switch != "live":
            return None
        return self._peak(self.state.kept), self._peak(wanted)

    def _peak(self, choices: Sequence[Choice]) -> Peak:
        if self.few is None:
            return once_more_if_ended(self._main, lambda running: running.peak(self._live(choices)))
        with self._started(self._from_start(choices)) as fresh:
            return fresh.peak(self._live(choices), steps=1)

    def _compare(self, wanted: Sequence[Choice], tried: Sequence[Choice]) -> Pairing:
        collected: list[tuple[float, float]] = []
        for attempt in range(ATTEMPTS):
            if self.few is not None:
                return self._compare_whole_runs(self.few, wanted, tried[-1])
            try:
                with self._arms(wanted) as arms:
                    return compare_arms(*arms, self._pace(tried), tried[-1], collected)
            except TrialEnded as end:
                if not end.by_itself or attempt == ATTEMPTS - 1:
                    raise
                self._note_length(end, self.first_seconds)
                self.close()
            except TrialStopped:
                if attempt == ATTEMPTS - 1:
                    raise
                self.close()
        raise AssertionError

    @contextlib.contextmanager
    def _arms(self, wanted: Sequence[Choice]) -> Iterator[tuple[Arm, Arm]]:
        """(what is kept, what is wanted), in one process where that can switch."""
        baseline = Arm(self._main(), self._live())
        if self._from_start(wanted) == self._from_start():
            yield baseline, Arm(baseline.process, self._live(wanted))
            return
        with self._fresh_arm(wanted) as other:
            yield baseline, other

    @contextlib.contextmanager
    def _fresh_arm(self, choices: Sequence[Choice]) -> Iterator[Arm]:
        with self._started(self._from_start(choices)) as process:
            yield Arm(process, self._live(choices))

    def _compare_whole_runs(self, few: FewSteps, wanted: Sequence[Choice], choice: Choice | None) -> Pairing:
        pair_seconds = few.pair_seconds(self.first_seconds or 0.0, self._restart_seconds(wanted))
        most = max(COMPARISON_SECONDS, WANTED_PAIRS * pair_seconds)
        pace = replace(few.pace, seconds=self._share(most))
        sides = (lambda: self._fresh_arm(self.state.kept)), (lambda: self._fresh_arm(wanted))
        return compare_whole_runs(*sides, few, pace, choice, lambda: self._remaining() > 2 * pair_seconds)

    def _pace(self, tried: Sequence[Choice] = ()) -> Pace:
        share, remaining = self._share(COMPARISON_SECONDS), self._remaining()
        pace = Pace.for_step(self.state.observed.step_seconds or 0.01, seconds=share)
        longest = min(LONGEST_SHARES * share, remaining / 2, max(share, remaining - self._needed_by_better(tried)))
        if len(tried) > 1:
            longest = LONGEST_OF_A_BUNDLE * remaining
        pace = replace(pace, longest_seconds=longest)
        return pace if self._length is None else pace_within(pace, self._length)

    def _needed_by_better(self, tried: Sequence[Choice]) -> float:
        """The most time that another lever needs, of those expected to save much, and more than this, for which there
        is time now: a small gain is not confirmed at the cost of a larger one."""
        least = max([MUCH_SAVED, *(self._proposals.saving(one).expected for one in tried)])
        others = [found[0] for name in self.names() if (found := self._open(name))]
        better = [self.combined((one,)) for one in others if self._proposals.saving(one).expected > least]
        return max((needed for one in better if (needed := self.needed_seconds(one)) < self._remaining()), default=0.0)

    def _share(self, most_seconds: float) -> float:
        """Time for one comparison, so that enough is left for the others."""
        remaining = self._remaining()
        return min(most_seconds, max(min(SHARE_SECONDS, remaining), remaining / (self._left + 2)))

    def _note_length(self, end: TrialEnded, step_seconds: float | None) -> None:
        self._length = end.steps
        self.state.few_steps = self.few or few_steps(end, step_seconds)
        if self.state.total_steps is None:
            self.state.total_steps = end.steps if self.few is None else self.few.steps
        if step_seconds is not None and end.steps * step_seconds < (self.state.startup_seconds or 0.0):
            self.state.short_run_steps = end.script_steps
        exits = f"{self.trials.name} exits with code {end.status} by itself, after {counted(end.script_steps, 'step')}"
        self.state.warnings += [exits] if end.status and exits not in self.state.warnings else []

    def _judge(self, pairing: Pairing) -> Measured:
        seconds = (pairing.baseline_seconds, pairing.candidate_seconds)
        found = self.judged(pairing.comparison, seconds, pairing.startup_seconds or 0.0)
        if pairing.startup_seconds is None:
            return replace(found, startup_seconds=None)
        if pairing.leak_bytes_per_step:
            leak = f"it leaks memory: {format_bytes(pairing.leak_bytes_per_step)} per step"
            return replace(found, outcome="failed", reason=leak)
        return found

    def _failure(self, error: Exception) -> Measured:
        """The result of a trial without a comparison, with the reason."""
        if isinstance(error, RolledBackInside):
            return Measured(outcome="failed", reason=str(error))
        self.close()
        if not isinstance(error, TrialEnded):
            return Measured(outcome="failed", reason=str(error))
        if error.by_itself:
            ended = f"the script ended after {counted(error.steps, 'step')}, too few to compare"
            return Measured(outcome="dropped", reason=f"not measured: {ended}; let it run longer")
        reason = f"the {self.trials.kind} failed under it: {error.headline or f'code {error.status}'}"
        return Measured(outcome="failed", reason=reason)

    def on_kept(self, wanted: Sequence[Choice], tried: Sequence[Choice]) -> None:
        if any(choice.lever.compiles for choice in tried):
            self._compile_seconds = self.state.trials[-1].startup_seconds or 0.0
        self._keep_back(self.first_seconds or 0.0)
        self._look_again()

    def without(self, choice: Choice, others: Sequence[Choice]) -> Comparison | None:
        slow_to_switch = choice.lever.switch != "live" and self._restart_seconds(others) > self.usual_trial_seconds
        if slow_to_switch or choice in self.state.for_memory or self._compiles_in_vain(others):
            return None
        try:
            if self.few is not None:
                return self._compare_whole_runs(self.few, others, None).comparison
            with self._arms(others) as arms:
                return compare_arms(*arms, self._pace()).comparison
        except (TrialError, ScriptError):
            self.close()
            return None

    def _compiles_in_vain(self, others: Sequence[Choice]) -> bool:
        """Does testing these need a compilation that there is no time for?"""
        compiled = next((one for one in others if one.lever.compiles), None)
        if compiled is None or graph_of(others) in self.state.compiled_graphs:
            return False
        first = usual_compile_seconds(self.state.first_observed, compiled.value)
        return self._remaining() <= first + self.usual_trial_seconds


def _with_work(seen: Observed, process: RunningTrial, described: Observed) -> Observed:
    """With what a step computes, and what was observed of the script before anything of ours ran."""
    as_written = {name: getattr(described, name) for name in ("compiled_in_script", "autocast_in_script")}
    return replace(seen, **asdict(process.work()), **as_written)
