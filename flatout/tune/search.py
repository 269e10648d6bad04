"""Find the levers that help, one at a time, in one live process where that is possible.

Order is the catalogue's: what changes no bit first. Each lever is switched on and off between windows of steps on top
of what has been kept so far, and kept if it is significantly faster. Then pairs that interact are tried, and each kept
lever must show that it still earns its place. A failure takes the lever back, never the search.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flatout.errors import ScriptError, TrialError
from flatout.levers.break_even import describe, payoff_steps, pays
from flatout.levers.catalogue import INTERACTING
from flatout.levers.lever import EXACTNESS_ORDER, Choice, Lever, split_by_switch
from flatout.levers.observed import Observed
from flatout.machine.description import Machine
from flatout.plan import Exactness
from flatout.tune.deadline import BudgetSpent, Deadline
from flatout.tune.for_memory import MemoryGain, judge_gain
from flatout.tune.short_budget import STARTS_OF_PROOF, no_step, too_slow
from flatout.tune.trial import NotTried, Trial
from flatout.tune.trial_process import (
    TrialEnded,
    TrialHangs,
    TrialProcess,
    TrialSetup,
    TrialStopped,
    explain_end,
)
from flatout.tune.windows import Arm, Pace, Pairing, RolledBackInside, compare_arms
from flatout.units import format_bytes, format_seconds

OBSERVED_STEPS = 30
FEWEST_STEPS = 12
"""A script with fewer cannot be compared with anything."""
STEPS_TO_COMPARE = 30
"""Warm-up and the fewest pairs of windows of one lever, where steps are slow."""
OBSERVATION_SHARE = 0.1
LEAST_PATIENCE_SECONDS = 60.0
"""With a script that shows no step: loading torch alone takes seconds, on a busy machine many."""
SLOWER_START = 3.0
"""Times the first start: so long a later one may take, under a lever or on a machine that has become busy."""
MOST_RESTARTS = 60
ATTEMPTS = 6
"""So often a short script is started again within one comparison."""
LEVER_SECONDS = 25.0
CONFLICTS = {
    "compile": ("attention",),
}
"""Choices that cannot stand beside each other, or of which one does the other's work: the newer replaces the older."""

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


@dataclass
class SearchState:
    """What is known so far; what a search returns."""

    kept: list[Choice] = field(default_factory=list)
    for_memory: list[Choice] = field(default_factory=list)
    """Those of the kept that need not be faster: they save memory that is short, or was asked to be saved."""
    trials: list[Trial] = field(default_factory=list)
    not_tried: list[NotTried] = field(default_factory=list)
    observed: Observed = field(default_factory=Observed)
    first_observed: Observed = field(default_factory=Observed)
    loop: str | None = None
    """What trains, as the first plain step showed it."""
    flops_per_step: float | None = None
    total_steps: int | None = None
    isolation: dict[str, Any] = field(default_factory=dict)
    startup_seconds: float | None = None
    warnings: list[str] = field(default_factory=list)


class Search:
    """One search over `levers` for one script. `run` returns the state; `close` ends its process."""

    def __init__(
        self,
        setup: TrialSetup,
        machine: Machine,
        levers: Sequence[Lever],
        limits: SearchLimits,
        progress: Progress = lambda text: None,
    ) -> None:
        self.setup = replace(setup, deadline=limits.deadline)
        self.machine, self.levers, self.limits = machine, levers, limits
        self.state = SearchState(total_steps=limits.total_steps)
        self._progress = progress
        self._process: TrialProcess | None = None
        self._restarts = 0
        self._levers_left = 1
        self._deadline = limits.deadline

    def run(self) -> SearchState:
        try:
            self._observe()
            for index, lever in enumerate(self.levers):
                rest = self.levers[index:]
                self._levers_left = sum(bool(one.applies(self.machine, self.state.observed)) for one in rest)
                self._try_lever(lever)
            self._second_look()
            self._try_pairs()
            self._drop_the_idle()
        finally:
            self.close()
        return self.state

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    # the process

    def _live(self, choices: Sequence[Choice] | None = None) -> list[Choice]:
        return split_by_switch(self.state.kept if choices is None else choices)[1]

    def _from_start(self, choices: Sequence[Choice] | None = None) -> list[Choice]:
        return split_by_switch(self.state.kept if choices is None else choices)[0]

    def _started(self, choices: Sequence[Choice]) -> TrialProcess:
        process = TrialProcess(self.setup, choices)
        process.expected_step_seconds = self.state.first_observed.step_seconds
        process.broken_off = process.expected_step_seconds is not None  # what a plain script says is always heard
        process.first_steps_seconds = patience = max(LEAST_PATIENCE_SECONDS, self._remaining())
        try:
            process.start(max(patience, SLOWER_START * (self.state.startup_seconds or 0.0)))
        except BaseException:
            process.close()
            raise
        return process

    def _main(self) -> TrialProcess:
        if self._process is None or not self._process.alive:
            self.close()
            self._restarts += 1
            if self._restarts > MOST_RESTARTS:
                raise TrialError(f"{MOST_RESTARTS} restarts of the script", limit="the search gives up there")
            self._process = self._started(self._from_start())
        return self._process

    # observation

    def _observe(self) -> None:
        self._progress("starting the script")
        steps = OBSERVED_STEPS
        try:
            seen, described = self._watch_plain(steps)
        except TrialEnded as end:
            if end.status != 0 or end.steps < FEWEST_STEPS:
                raise explain_end(end, self.setup.target.name) from None
            self._note_length(end)
            self.close()
            try:
                seen, described = self._watch_plain(max(2, end.steps - 10))
            except TrialEnded as again:
                raise explain_end(again, self.setup.target.name) from None
        except TrialHangs as silence:
            name, startup = self.setup.target.name, self.state.startup_seconds
            raise no_step(name, silence.seconds, startup, self._deadline) from None
        self.state.observed = replace(
            seen, compiled_in_script=described.compiled_in_script, autocast_in_script=described.autocast_in_script
        )
        self.state.first_observed = self.state.observed
        main = self._main()
        main.expected_step_seconds, main.broken_off = self.state.observed.step_seconds, True

    def _watch_plain(self, steps: int) -> tuple[Observed, Observed]:
        """(what `steps` plain steps showed, what was there before anything of ours ran); also counts FLOPs."""
        try:
            process = self._main()
            self.state.isolation = process.isolation
            self.state.startup_seconds = process.startup_seconds
            self._keep_back(process.startup_seconds or 0.0)
            described = process.describe()
            self.state.loop = described.loop
            self._progress("timing the first plain steps")
            window = process.window([], settle=1, steps=1)
            affordable = self._affordable_steps(min(window.settle_seconds + window.seconds))
            steps = min(steps, OBSERVED_STEPS, affordable)
            self._progress(f"watching {steps} plain steps")
            seen = process.breakdown([], steps=steps)
            self.state.flops_per_step = process.flops()
            return seen, described
        except TrialStopped as stop:
            raise ScriptError(
                f"{self.setup.target.name}: {stop}",
                limit="copy-on-write is refused here, so a trial may not go on",
                remedy=str(self.state.isolation.get("reason", "")),
            ) from None

    def _budget(self) -> str:
        return format_seconds(self._deadline.budget_seconds)

    def _keep_back(self, startup_seconds: float) -> None:
        """More for the proof, where a slow start makes it long: a search that leaves no time for it is for nothing."""
        missing = STARTS_OF_PROOF * startup_seconds - self.limits.deadline.reserved_seconds
        self._deadline = self.limits.deadline.reserving(max(0.0, missing))

    def _affordable_steps(self, step_seconds: float) -> int:
        """How many plain steps may be watched; ScriptError where the budget is too short to compare anything."""
        if STEPS_TO_COMPARE * step_seconds > self._remaining():
            startup = self.state.startup_seconds or 0.0
            raise too_slow(self.setup.target.name, startup, step_seconds, STEPS_TO_COMPARE, self._deadline)
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
        if not self._exact_enough(lever):
            self._skip(lever.name, f"it is {lever.exactness}, and --exactness is {self.limits.exactness}")
            return
        verdict = lever.applies(self.machine, self.state.observed)
        if not verdict:
            self._skip(lever.name, verdict.reason)
            return
        for value in self._allowed(lever, verdict.values):
            self._try(Choice(lever, value))

    def _exact_enough(self, lever: Lever) -> bool:
        return EXACTNESS_ORDER.index(lever.exactness) <= EXACTNESS_ORDER.index(self.limits.exactness)

    def _second_look(self) -> None:
        """What was too small a part of the plain step to bother with may be a large one of the faster step."""
        if self._remaining() <= 0:
            return  # values not tried for lack of time would be listed a second time
        refused = {entry.label for entry in self.state.not_tried}
        for lever in self.levers:
            if not self.state.kept or lever.name not in refused or not self._exact_enough(lever):
                continue
            if lever.applies(self.machine, self.state.observed):
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
        self._progress(f"trying {label}")
        began = time.monotonic()
        try:
            pairing = self._compare(wanted, choices[-1])
            outcome, reason, payoff = self._judge(pairing, choices)
            gain = self._memory_gain(wanted, choices[-1])
            if gain is not None and outcome == "dropped":
                outcome, reason = self._judge_memory(gain, choices[-1])
        except BudgetSpent:
            self.close()
            self._skip(label, f"broken off: {self._spent()}", for_lack_of_time=True)
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

    def _starting_seconds(self, wanted: Sequence[Choice]) -> float:
        """Until the first step of a trial: a start is not broken off."""
        fresh = self._process is None or self._from_start(wanted) != self._from_start()
        return (self.state.startup_seconds or 0.0) if fresh else 0.0

    def _spent(self) -> str:
        return f"the search's share of the budget of {self._budget()} was spent"

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
            replaced |= set(CONFLICTS.get(choice.field, ()))
        return [choice for choice in self.state.kept if choice.field not in replaced] + list(choices)

    def _compare(self, wanted: Sequence[Choice], choice: Choice) -> Pairing:
        collected: list[tuple[float, float]] = []
        for attempt in range(ATTEMPTS):
            main = self._main()
            other: TrialProcess | None = None
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
        seconds = min(LEVER_SECONDS, max(3.0, self._remaining() / (self._levers_left + 2)))
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
        return "failed", f"the script failed under it: {error.headline or f'code {error.status}'}"

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
        worst = max((choice.lever.exactness for choice in choices), key=EXACTNESS_ORDER.index)
        self.state.trials.append(
            Trial(
                label=label,
                plan_field="+".join(choice.field for choice in choices),
                value=choices[0].value if len(choices) == 1 else [choice.value for choice in choices],
                exactness=worst,
                outcome=outcome,
                reason=reason,
                baseline_seconds=pairing.baseline_seconds if pairing else None,
                candidate_seconds=pairing.candidate_seconds if pairing else None,
                comparison=pairing.comparison if pairing else None,
                startup_seconds=pairing.startup_seconds if pairing else None,
                payoff_steps=payoff,
                on_top_of=tuple(choice.label for choice in self.state.kept),
                cost_seconds=cost_seconds,
            )
        )

    def _keep(self, wanted: Sequence[Choice]) -> None:
        restart = self._from_start(wanted) != self._from_start()
        self.state.kept = list(wanted)
        if restart:
            self.close()
        self._look_again()

    def _try_pairs(self) -> None:
        """Two levers of which at least one was dropped for being slow may help together (bf16 with compile)."""
        for first, second in INTERACTING:
            kept = {choice.field for choice in self.state.kept}
            if {first, second} <= kept:
                continue
            parts = [self._best_choice(name) for name in (first, second) if name not in kept]
            dropped = [part for part in parts if part is not None]
            if len(dropped) == len(parts) == 2 and self._plausible(dropped):
                self._try(*dropped)

    def _best_choice(self, plan_field: str) -> Choice | None:
        """The best of the dropped values of a field; None if it was never measured."""
        measured = [
            trial
            for trial in self.state.trials
            if trial.plan_field == plan_field and trial.outcome == "dropped" and trial.comparison is not None
        ]
        if not measured:
            return None
        best = max(measured, key=lambda trial: trial.comparison.ratio if trial.comparison else 0.0)
        lever = next(lever for lever in self.levers if lever.plan_field == plan_field)
        return Choice(lever, best.value)

    def _plausible(self, choices: Sequence[Choice]) -> bool:
        """A pair is worth its cost unless one of the two made things much slower by itself."""
        ratios = [
            trial.comparison.ratio
            for trial in self.state.trials
            for choice in choices
            if trial.plan_field == choice.field and trial.value == choice.value and trial.comparison is not None
        ]
        return min(ratios, default=0.0) > 0.8

    def _drop_the_idle(self) -> None:
        """Take each kept lever away once, oldest first: what a later one has made useless goes."""
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
