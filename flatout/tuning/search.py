"""Find the levers that help, one at a time, in one live process where that is possible.

What may save most of a step per second of trial comes first, judged anew whenever a lever was kept. Each is switched on
and off between windows of steps on top of what has been kept so far, and kept if it is significantly faster. Then pairs
that interact are tried, and each kept lever must show that it still earns its place. A failure takes the lever back,
never the search.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from flatout.errors import ScriptError, TrialError
from flatout.levers.break_even import describe, payoff_steps, pays
from flatout.levers.lever import Choice, Lever, Verdict, split_by_switch
from flatout.levers.observed import Observed
from flatout.machine.description import Machine
from flatout.plan_choices import Exactness, worst
from flatout.tuning.deadline import BudgetSpent, Deadline
from flatout.tuning.for_memory import MemoryGain, judge_gain
from flatout.tuning.short_budget import enough_for, no_step, too_slow
from flatout.tuning.trial import NotTried, SearchState, Trial
from flatout.tuning.trial_process import (
    TrialEnded,
    TrialHangs,
    TrialStopped,
    explain_end,
)
from flatout.tuning.trials import RunningTrial, Trials
from flatout.tuning.verifier import least_seconds
from flatout.tuning.windows import Arm, Pace, Pairing, RolledBackInside, compare_arms
from flatout.tuning.worth_trying import COMPARISON_SECONDS, pairs_worth_trying, saving_per_second, worth_trying
from flatout.units import format_bytes, format_seconds

OBSERVED_STEPS = 30
FEWEST_STEPS = 12
"""A script with fewer cannot be compared with anything."""
OBSERVATION_SHARE = 0.1
LEAST_PATIENCE_SECONDS = 60.0
"""With a script that shows no step: loading torch alone takes seconds, on a busy machine many."""
SLOWER_START = 3.0
"""Times the first start: so long a later one may take, under a lever or on a machine that has become busy."""
MOST_RESTARTS = 60
ATTEMPTS = 6
"""So often a short script is started again within one comparison."""

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class SearchLimits:
    """What bounds a search."""

    deadline: Deadline
    exactness: Exactness = "reduced"
    total_steps: int | None = None
    """How many steps the script is going to run; None: unknown."""
    only: tuple[tuple[str, Any], ...] | None = None
    """Try just these (plan field, value) choices: how a plan from elsewhere is verified. None: whatever applies."""


class Search:
    """One search over `levers` for one script. `run` returns the state; `close` ends its process."""

    def __init__(
        self,
        trials: Trials,
        machine: Machine,
        levers: Sequence[Lever],
        limits: SearchLimits,
        progress: Progress = lambda text: None,
    ) -> None:
        self.trials = trials
        self.machine, self.levers, self.limits = machine, levers, limits
        self.state = SearchState(total_steps=limits.total_steps)
        self._progress = progress
        self._process: RunningTrial | None = None
        self._restarts = 0
        self._levers_left = 1
        self._deadline = limits.deadline
        self._ended = False

    def run(self) -> SearchState:
        try:
            self._observe()
            untried = list(self.levers)
            while untried:
                offered = [one for one in untried if self._worth_trying(one)]
                self._levers_left = len(offered)
                lever = max(offered or untried, key=self._promise)
                untried.remove(lever)
                self._try_lever(lever)
            self._second_look()
            for choices in pairs_worth_trying(self.state, self.levers):
                self._try(*choices)
            self._drop_the_idle()
        finally:
            self._ended = True
            self.close()
        self.state.enough_seconds = self._enough_seconds()
        return self.state

    def stop(self) -> bool:
        """End `run` soon, with what is kept so far: a signal handler may call it. False where that is nothing."""
        if not self._ended:
            self.state.stopped_after_seconds = self._deadline.elapsed_seconds
            self._deadline.stopped = True
        return bool(self.state.kept)

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    # the process

    def _live(self, choices: Sequence[Choice] | None = None) -> list[Choice]:
        return split_by_switch(self.state.kept if choices is None else choices)[1]

    def _from_start(self, choices: Sequence[Choice] | None = None) -> list[Choice]:
        return split_by_switch(self.state.kept if choices is None else choices)[0]

    def _started(self, choices: Sequence[Choice]) -> RunningTrial:
        process = self.trials.trial(choices)
        process.deadline = self._deadline
        process.expected_step_seconds = self.state.first_observed.step_seconds
        process.broken_off = process.expected_step_seconds is not None  # what a plain script says is always heard
        process.first_steps_seconds = patience = max(LEAST_PATIENCE_SECONDS, self._remaining())
        try:
            process.start(max(patience, SLOWER_START * (self.state.startup_seconds or 0.0)))
        except BaseException:
            process.close()
            raise
        return process

    def _main(self) -> RunningTrial:
        if self._process is None or not self._process.alive:
            self.close()
            self._restarts += 1
            if self._restarts > MOST_RESTARTS:
                raise TrialError(f"{MOST_RESTARTS} restarts of the script", limit="the search gives up there")
            self._process = self._started(self._from_start())
        return self._process

    # observation

    def _observe(self) -> None:
        self._progress(f"starting the {self.trials.kind}")
        steps = OBSERVED_STEPS
        try:
            seen, described = self._watch_plain(steps)
        except TrialEnded as end:
            if end.status != 0 or end.steps < FEWEST_STEPS:
                raise explain_end(end, self.trials.name) from None
            self._note_length(end)
            self.close()
            try:
                seen, described = self._watch_plain(max(2, end.steps - 10))
            except TrialEnded as again:
                raise explain_end(again, self.trials.name) from None
        except TrialHangs as silence:
            name, startup = self.trials.name, self.state.startup_seconds
            raise no_step(name, silence.seconds, startup, self._deadline) from None
        self.state.observed = replace(
            seen,
            compiled_in_script=described.compiled_in_script,
            autocast_in_script=described.autocast_in_script,
        )
        self.state.first_observed = self.state.observed
        main = self._main()
        main.expected_step_seconds, main.broken_off = self.state.observed.step_seconds, True

    def _watch_plain(self, steps: int) -> tuple[Observed, Observed]:
        """(what `steps` plain steps showed, what was there before anything of ours ran)"""
        try:
            process = self._main()
            self.state.isolation = dict(process.isolation)
            self.state.startup_seconds = process.startup_seconds
            self.state.restart_seconds = process.start_seconds or 0.0
            self._keep_back(0.0)
            described = process.describe()
            self.state.loop = described.loop
            self._progress("timing the first plain steps")
            window = process.window([], settle=1, steps=1)
            step_seconds = min(window.settle_seconds + window.seconds)
            self._keep_back(step_seconds)
            affordable = self._affordable_steps(step_seconds)
            steps = min(steps, OBSERVED_STEPS, affordable)
            self._progress(f"watching {steps} plain steps")
            seen = process.breakdown([], steps=steps)
            return replace(seen, **asdict(process.work())), described
        except TrialStopped as stop:
            raise ScriptError(
                f"{self.trials.name}: {stop}",
                limit="copy-on-write is refused here, so a trial may not go on",
                remedy=str(self.state.isolation.get("reason", "")),
            ) from None

    def _budget(self) -> str:
        return format_seconds(self._deadline.budget_seconds)

    def _keep_back(self, step_seconds: float) -> None:
        """More for the verifier, where slow starts or long steps make it take long: a search that leaves no time for it
        is for nothing."""
        needed = least_seconds(step_seconds, self.state.restart_seconds, self.trials, self._deadline.budget_seconds)
        missing = needed - self.limits.deadline.reserved_seconds
        self._deadline = self.limits.deadline.reserving(max(0.0, missing))
        if self._process is not None:
            self._process.deadline = self._deadline

    def _affordable_steps(self, step_seconds: float) -> int:
        """How many plain steps may be watched; ScriptError where the budget is too short to compare anything."""
        steps = Pace.for_step(step_seconds, seconds=self._remaining()).least_steps
        if steps * step_seconds > self._remaining():
            startup = self.state.startup_seconds or 0.0
            raise too_slow(self.trials.name, startup, step_seconds, steps, self._deadline)
        return max(2, int(OBSERVATION_SHARE * self._remaining() / step_seconds))

    def _look_again(self) -> None:
        """After a lever was kept the shares of a step are others: a loader lever may now have nothing left to win."""
        try:
            seen = self._main().breakdown(self._live(), steps=OBSERVED_STEPS // 2)
        except TrialError:
            self.close()
            return
        self.state.observed = replace(
            self.state.observed,
            device=seen.device,
            step_seconds=seen.step_seconds,
            breakdown_seconds=seen.breakdown_seconds,
            page_faults_per_step=seen.page_faults_per_step,
        )

    # trials

    def _allowed(self, lever: Lever, values: Sequence[Any]) -> list[Any]:
        """The values that the limits leave; all of them if the limits name none."""
        if self.limits.only is None:
            return list(values)
        return [value for name, value in self.limits.only if name == lever.plan_field and value in values]

    def _try_lever(self, lever: Lever) -> None:
        if self.limits.only is not None and lever.plan_field not in dict(self.limits.only):
            return
        verdict = self._worth_trying(lever)
        if not verdict:
            self._skip(lever.name, verdict.reason)
            return
        for value in self._allowed(lever, verdict.values):
            self._try(Choice(lever, value))

    def _worth_trying(self, lever: Lever) -> Verdict:
        asked = self.limits.only is not None
        return worth_trying(lever, self.machine, self.state.observed, self.limits.exactness, asked=asked)

    def _promise(self, lever: Lever) -> tuple[bool, float]:
        """The greatest is tried next."""
        found = saving_per_second(lever, self.machine, self.state.observed, self.state.restart_seconds)
        return lever.comes_first, found

    def _second_look(self) -> None:
        """What was too small a part of the plain step to bother with may be a large one of the faster step."""
        if self._remaining() <= 0:
            return  # values not tried for lack of time would be listed a second time
        refused = {entry.label for entry in self.state.not_tried}
        for lever in self.levers:
            if not self.state.kept or lever.name not in refused:
                continue
            if self._worth_trying(lever):
                self.state.not_tried = [entry for entry in self.state.not_tried if entry.label != lever.name]
                self._try_lever(lever)

    def _skip(self, label: str, reason: str, *, for_lack_of_time: bool = False) -> None:
        self.state.not_tried.append(NotTried(label=label, reason=reason, for_lack_of_time=for_lack_of_time))

    def _remaining(self) -> float:
        return self._deadline.seconds_left

    def _try(self, *choices: Choice) -> bool:
        """Try `choices` together on top of what is kept; True if they were kept."""
        label = " + ".join(choice.label for choice in choices)
        wanted = self._with(choices)
        if self._remaining() <= self._starting_seconds(wanted):
            self._skip(label, self._spent(), for_lack_of_time=True)
            return False
        self._progress(f"trying {label}{self._so_far()}")
        began = time.monotonic()
        try:
            pairing = self._compare(wanted, choices[-1])
            outcome, reason, payoff = self._judge(pairing, choices)
            gain = self._memory_gain(wanted, choices[-1])
            if gain is not None and outcome == "dropped":
                outcome, reason = self._judge_memory(gain, choices[-1])
        except BudgetSpent:
            self.close()
            broken_off = "broken off as the search was stopped"
            reason = broken_off if self._deadline.stopped else f"broken off, {self._spent()}"
            self._skip(label, reason, for_lack_of_time=True)
            return False
        except (TrialError, ScriptError) as error:
            pairing, payoff, gain = None, None, None
            outcome, reason = self._failure(error)
        self._record(choices, label, pairing, outcome, reason, payoff, time.monotonic() - began)
        if gain is not None:
            before, after = gain.before.peak_bytes, gain.after.peak_bytes
            self.state.trials[-1] = replace(
                self.state.trials[-1], baseline_peak_bytes=before, candidate_peak_bytes=after
            )
        if outcome == "kept":
            self._keep(wanted)
        return outcome == "kept"

    def _so_far(self) -> str:
        """For the line that says what is tried: the step as it was and as it is now, and the time that is left."""
        kept = [trial.candidate_seconds for trial in self.state.trials if trial.outcome == "kept"]
        first, left = self.state.first_observed.step_seconds, f"{format_seconds(self._remaining())} left"
        if not kept or kept[-1] is None or first is None:
            return f" · {left}"
        return f" · a step took {format_seconds(first)}, now {format_seconds(kept[-1])} · {left}"

    def _starting_seconds(self, wanted: Sequence[Choice]) -> float:
        """Until the first step of a trial: a start is not broken off."""
        fresh = self._process is None or self._from_start(wanted) != self._from_start()
        return self.state.restart_seconds if fresh else 0.0

    def _spent(self) -> str:
        if self._deadline.stopped:
            return "not reached before the search was stopped"
        return f"not reached in the search's share of the budget of {self._budget()}"

    def _enough_seconds(self) -> float | None:
        """By what the trials cost that were made; where there was none, by the fewest steps of one."""
        late = sum(entry.for_lack_of_time for entry in self.state.not_tried)
        if not late or self._deadline.stopped:
            return None
        step_seconds = self.state.first_observed.step_seconds or 0.01
        least = step_seconds * Pace.for_step(step_seconds, seconds=COMPARISON_SECONDS).least_steps
        costs = [trial.cost_seconds for trial in self.state.trials] or [least]
        more = late * sum(costs) / len(costs)
        return enough_for(self._deadline.elapsed_seconds + more, self._deadline)

    def _memory_gain(self, wanted: Sequence[Choice], choice: Choice) -> MemoryGain | None:
        """What a choice that is for memory saves of it; None for any other."""
        if choice.lever.aim != "memory" or choice.lever.switch != "live":
            return None
        main = self._main()
        return MemoryGain(before=main.peak(self._live()), after=main.peak(self._live(wanted)))

    def _judge_memory(self, gain: MemoryGain, choice: Choice) -> tuple[str, str]:
        asked = self.limits.only is not None
        outcome, reason = judge_gain(gain, choice, self.machine, self.state.observed.device, asked=asked)
        if outcome == "kept":
            self.state.for_memory.append(choice)
        return outcome, reason

    def _with(self, choices: Sequence[Choice]) -> list[Choice]:
        replaced = {choice.field for choice in choices}
        for choice in choices:
            replaced |= set(choice.lever.declared.replaces)
        wanted = [choice for choice in self.state.kept if choice.field not in replaced] + list(choices)
        places = {lever.name: place for place, lever in enumerate(self.levers)}
        return sorted(wanted, key=lambda choice: places.get(choice.lever.name, len(places)))  # as a plan applies them

    def _compare(self, wanted: Sequence[Choice], choice: Choice) -> Pairing:
        collected: list[tuple[float, float]] = []
        for attempt in range(ATTEMPTS):
            main = self._main()
            other: RunningTrial | None = None
            try:
                if self._from_start(wanted) != self._from_start():
                    other = self._started(self._from_start(wanted))
                baseline = Arm(main, self._live())
                candidate = Arm(other or main, self._live(wanted))
                return compare_arms(baseline, candidate, self._pace(choice), choice, collected)
            except TrialEnded as end:
                if end.status != 0 or attempt == ATTEMPTS - 1:
                    raise
                self._note_length(end)
                self.close()
            except TrialStopped:
                if attempt == ATTEMPTS - 1:
                    raise
                self.close()
            finally:
                if other is not None:
                    other.close()
        raise AssertionError

    def _pace(self, choice: Choice) -> Pace:
        seconds = min(COMPARISON_SECONDS, max(3.0, self._remaining() / (self._levers_left + 2)))
        return Pace.for_step(self.state.observed.step_seconds or 0.01, seconds=seconds)

    def _note_length(self, end: TrialEnded) -> None:
        if self.state.total_steps is None:
            self.state.total_steps = end.steps

    def _judge(self, pairing: Pairing, choices: Sequence[Choice]) -> tuple[str, str, int | None]:
        payoff = payoff_steps(pairing.startup_seconds, pairing.baseline_seconds, pairing.candidate_seconds)
        if pairing.leak_bytes_per_step:
            return "failed", f"it leaks memory: {format_bytes(pairing.leak_bytes_per_step)} a step", payoff
        verdict = pairing.comparison.verdict
        cost = describe(pairing.startup_seconds, payoff, self.state.total_steps)
        if verdict != "faster":
            reason = verdict if not cost else f"{verdict}, and {format_seconds(pairing.startup_seconds)} to start"
            return "dropped", reason, payoff
        if not pays(payoff, self.state.total_steps):
            return "dropped", cost, payoff
        return "kept", cost or "faster", payoff

    def _failure(self, error: Exception) -> tuple[str, str]:
        """What became of a trial that gave no comparison, and why."""
        if isinstance(error, RolledBackInside):
            return "failed", str(error)
        self.close()
        if not isinstance(error, TrialEnded):
            return "failed", str(error)
        if error.status == 0:
            steps = f"{error.steps} step{'s' * (error.steps != 1)}"
            return "dropped", f"not measured: the script ended after {steps}, too few to compare"
        return "failed", f"the {self.trials.kind} failed under it: {error.headline or f'code {error.status}'}"

    def _record(
        self,
        choices: Sequence[Choice],
        label: str,
        pairing: Pairing | None,
        outcome: Any,
        reason: str,
        payoff: int | None,
        cost_seconds: float,
    ) -> None:
        self.state.trials.append(
            Trial(
                label=label,
                plan_field="+".join(choice.field for choice in choices),
                value=choices[0].value if len(choices) == 1 else [choice.value for choice in choices],
                exactness=worst(choice.exactness for choice in choices),
                outcome=outcome,
                reason=reason,
                baseline_seconds=pairing.baseline_seconds if pairing else None,
                candidate_seconds=pairing.candidate_seconds if pairing else None,
                comparison=pairing.comparison if pairing else None,
                startup_seconds=pairing.startup_seconds if pairing else None,
                payoff_steps=payoff,
                on_top_of=tuple(choice.label for choice in self.state.kept),
                predicted=choices[0].lever.saving(self.machine, self.state.observed) if len(choices) == 1 else None,
                cost_seconds=cost_seconds,
            )
        )

    def _keep(self, wanted: Sequence[Choice]) -> None:
        restart = self._from_start(wanted) != self._from_start()
        self.state.kept = list(wanted)
        if restart:
            self.close()
        self._look_again()

    def _drop_the_idle(self) -> None:
        """Take each kept lever away once: what a later one has made useless goes."""
        if len(self.state.kept) < 2:
            return
        for choice in list(self.state.kept):
            if choice.lever.switch != "live" or choice in self.state.for_memory or self._remaining() <= 0:
                continue
            without = [other for other in self.state.kept if other != choice]
            self._progress(f"is {choice.label} still needed?")
            try:
                main = self._main()
                pairing = compare_arms(Arm(main, self._live()), Arm(main, self._live(without)), self._pace(choice))
            except TrialError:
                self.close()
                continue
            if pairing.comparison.verdict == "faster":
                self.state.kept = without
                gain = f"x{pairing.comparison.ratio:.2f} without it"
                self.state.trials = [
                    replace(trial, outcome="dropped", reason=f"no longer helps beside the levers kept after it: {gain}")
                    if trial.outcome == "kept" and trial.plan_field == choice.field
                    else trial
                    for trial in self.state.trials
                ]
