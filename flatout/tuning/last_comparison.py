"""Plain against planned in new processes: the speedup that a tune reports.

Several pairs of processes are started one after the other, each pair runs in alternating windows, and nothing is
watched beyond what `flatout run` watches most of the time. Disturbances on a shared machine last about a second, so
each pair is measured for as long as it took to start. The interval covers the variation between windows of one pair of
processes and the variation between pairs: memory placement costs a few per cent over a whole run, and far more in
scripts with large temporary tensors.

For a script with few steps, whole runs are compared: each pair of processes gives one pair of runs.

Two or three pairs are too few to estimate that variance, so it is shrunk towards a typical one, as in a moderated
t-test (Smyth 2004, doi:10.2202/1544-6115.1027), unless they contradict it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

from flatout.errors import TrialError
from flatout.levers.lever import Choice, split_by_switch
from flatout.script.trial.answers import TrialEnded
from flatout.search.deadline import Deadline
from flatout.search.search import Progress
from flatout.statistics import Comparison, chi_square_95, compare_paired, student_95
from flatout.terminal import Notice
from flatout.tuning.trials import Trials
from flatout.tuning.windows import (
    Arm,
    FewSteps,
    Pace,
    Pairing,
    compare_arms,
    mean_of_each,
    pair_of_runs,
    pairing_of_runs,
)
from flatout.units import format_seconds

LEAST_PROCESS_PAIRS, WANTED_PROCESS_PAIRS, MANY_PROCESS_PAIRS, MOST_PROCESS_PAIRS = 2, 3, 10, 40
NARROW_ENOUGH, NARROW_AFTER_MANY = 0.03, 0.05
"""Half of the interval, as a share of the ratio, below which no further pair of processes is started. After many pairs
less is required, unless it is still open whether there is a gain: such variation would take very many more."""
LEAST_SECONDS, MOST_SECONDS = 1.0, 2.5
"""Of windows in one pair of processes, where its start took less than the longer. Where memory placement varies,
processes differ more than windows do, so the time is better spent on more processes."""
LEAST_WINDOWS, MOST_WINDOWS = 4, 400
"""Pairs of windows per pair of processes."""
UNDECIDED_SHARE = 0.05
"""Share of the budget by which it may take longer where the gain is not yet certain: without another pair, everything
that was found would be dropped."""
LARGE_GAIN, LARGE_UNDECIDED_SHARE = 1.5, 0.15
"""A ratio beyond which the share is larger: there is much to lose, and a machine must be very busy to hide it."""
LEAST_SHARE_BEYOND, SECOND_PAIR_SHARE = 0.1, 0.2
"""Shares of the budget by which it may be exceeded for the fewest pairs that can decide: the larger where the first one
shows NOTABLE_GAIN or more, as one pair alone confirms only what is beyond x1.66."""
NOTABLE_GAIN = 1.1
LEAST_OVER_SAID = 0.05
"""Share of the budget by which it is exceeded: from there on that is said as it begins."""
WARM_IN_STARTED = 1
"""First steps that are not counted of processes that have made steps under the same levers before."""
MOST_STARTS = 40
"""A short script is restarted until there are enough windows."""
USUAL_DEVIATION, USUAL_FREEDOM = 0.04, 1
"""The typical standard deviation of the log ratio between pairs of processes, and the degrees of freedom it counts for.
`python -m benchmarks.gain.processes` measures it, and how often intervals from few pairs hold the ratio of all."""


Pairs = list[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Started:
    """Pairs of processes that have started already, as those of a proof."""

    pairs: Sequence[tuple[Arm, Arm]] = ()
    startup_seconds: float = 0.0
    """What it takes to turn the candidate on, which these have done."""
    come_first: bool = False
    """Is there no time for new ones before them? Otherwise they take the place of those that time is too short for."""


NOTHING_STARTED = Started()


class Sides(Protocol):
    """Two ways of running one script, in new processes."""

    def together(self) -> AbstractContextManager[tuple[Arm, Arm]]:
        """(baseline, candidate), both at their first step."""

    def baseline(self) -> AbstractContextManager[Arm]:
        """A run of its own, at its first step."""

    def candidate(self) -> AbstractContextManager[Arm]: ...


@dataclass(frozen=True)
class PlainAndPlanned:
    """A script, or a training step, as it is and under a plan."""

    trials: Trials
    choices: Sequence[Choice]

    @contextlib.contextmanager
    def together(self) -> Iterator[tuple[Arm, Arm]]:
        """Watched as lightly as `flatout run` does most of the time."""
        from_start, live = split_by_switch(self.choices)
        with self.trials.trial(label="plain") as plain, self.trials.trial(from_start, label="planned") as planned:
            if self.trials.starts_overlap:
                plain.spawn()
                planned.spawn()
            plain.start()
            planned.start()
            yield Arm(plain, suspended=True), Arm(planned, live, suspended=True)

    def baseline(self) -> AbstractContextManager[Arm]:
        return self._run((), "plain")

    def candidate(self) -> AbstractContextManager[Arm]:
        return self._run(self.choices, "planned")

    @contextlib.contextmanager
    def _run(self, choices: Sequence[Choice], label: str) -> Iterator[Arm]:
        """Watched as `flatout run` watches the first steps."""
        from_start, live = split_by_switch(choices)
        with self.trials.trial(from_start, label=label) as fresh:
            fresh.start()
            yield Arm(fresh, live)


def trials_as_used(trials: Trials, few: FewSteps | None = None) -> Trials:
    """The trials in which steps take as long as in a user's process: new processes, not forks.

    In forks of a process that has loaded torch the gain of a step of 0.4 ms came out 3 % too high (16 pairs). Two of
    three tunes with longer steps stated 4 and 11 % too much in forks, and none of them in new processes; the machine
    was busier during the former. few: the script's length, where whole runs are compared; as it is started many
    times, its trials are forked from a process that has loaded torch.
    """
    return trials.in_new_processes() if few is None else trials.from_the_start()


def compare_afresh(
    sides: Sides,
    pace: Pace,
    deadline: Deadline,
    seconds: float,
    few: FewSteps | None = None,
    started: Started = NOTHING_STARTED,
    progress: Progress = lambda text: None,
) -> Pairing:
    """Takes about `seconds`, or what `deadline` leaves if that is more, until the interval is narrow.

    Takes longer where starts or steps are so long that fewer windows would prove nothing, which `progress` is told.
    few: the script's length, where whole runs are compared; the length of windows does not matter then.

    Raises TrialError if a process fails, TrialEnded if the script is too short even for windows of one step.
    """
    pace = replace(
        pace, least_pairs=LEAST_WINDOWS, most_pairs=MOST_WINDOWS, counts_warm_up=True, stops_when_decided=False
    )
    return _Comparing(sides, pace, deadline, max(seconds, deadline.seconds_left), few, started, progress).run()


class _Comparing:
    """One such comparison: a group of pairs of windows for each pair of processes."""

    def __init__(
        self,
        sides: Sides,
        pace: Pace,
        deadline: Deadline,
        seconds: float,
        few: FewSteps | None,
        started: Started,
        progress: Progress,
    ) -> None:
        self._sides, self._pace, self._deadline, self._few = sides, pace, deadline, few
        self._progress = progress
        self._available, self._began = seconds, deadline.elapsed_seconds
        self._left_at_first = deadline.seconds_left
        self._started, self._waiting = started, [*started.pairs]
        self._least = 1 if few is None else few.pace.least_pairs
        self._groups: list[Pairs] = []
        self._means: list[tuple[float, float]] = []
        self._new: list[Pairing] = []

    def run(self) -> Pairing:
        while self._started.come_first and self._waiting and self._has_too_few():
            self._compare_started()
        while not self._groups or self._may_go_on():
            if len(self._new) == MOST_PROCESS_PAIRS or self._is_precise() or not self._compare_new():
                break
            while self._waiting and self._has_too_few() and not self._may_go_on():
                self._compare_started()
        every = [pair for group in self._groups for pair in group]
        startup = self._new[-1].startup_seconds if self._new else self._started.startup_seconds
        return replace(
            Pairing.of(every, self._found(), startup),
            peak_resident_bytes=self._new[-1].peak_resident_bytes if self._new else None,
            mean_seconds=mean_of_each(self._means) if self._means else None,
        )

    def _found(self) -> Comparison:
        return comparison_of_groups(self._groups, self._pace.least_gain)

    def _is_undecided(self) -> bool:
        found = self._found()
        return found.verdict == "not significant" and found.ratio > 1 + self._pace.least_gain

    def _has_too_few(self) -> bool:
        """Would it take another pair of processes to decide?"""
        return not self._groups or (len(self._groups) < LEAST_PROCESS_PAIRS and self._is_undecided())

    def _is_precise(self) -> bool:
        return bool(self._groups) and _is_narrow(self._found(), len(self._groups), undecided=self._is_undecided())

    @property
    def _spent(self) -> float:
        return self._deadline.elapsed_seconds - self._began

    def _may_go_on(self) -> bool:
        """Is there time for one more new pair?"""
        most, budget_seconds = self._available, self._deadline.budget_seconds
        too_few = len(self._groups) < LEAST_PROCESS_PAIRS
        if self._is_undecided() and not (too_few and self._waiting):
            ratio = self._found().ratio
            most += (LARGE_UNDECIDED_SHARE if ratio > LARGE_GAIN else UNDECIDED_SHARE) * budget_seconds
            if too_few:
                beyond = SECOND_PAIR_SHARE if ratio > NOTABLE_GAIN else LEAST_SHARE_BEYOND
                most = max(most, self._left_at_first + beyond * budget_seconds)
        return len(self._groups) < self._least or self._spent + self._pair_seconds <= most

    @property
    def _pair_seconds(self) -> float:
        return self._spent / (len(self._new) or len(self._groups))

    def _say_what_goes_over(self) -> None:
        """Where one more pair is begun that ends after the budget, because the gain is not certain yet."""
        over = self._spent + self._pair_seconds - self._left_at_first
        if self._left_at_first > 0 and over > LEAST_OVER_SAID * self._deadline.budget_seconds:
            longer = f"another comparison takes about {format_seconds(over)} longer than the budget"
            self._progress(Notice(f"x{self._found().ratio:.2f} is not certain yet: {longer}"))

    def _compare_new(self) -> bool:
        """False: a new pair has failed, of which there are enough."""
        if self._groups:
            self._say_what_goes_over()
        pairs: Pairs = []
        number, left = len(self._new), self._available - self._spent
        try:
            if self._few is None:
                wanted = max(1, WANTED_PROCESS_PAIRS - number)
                pairing, self._pace = one_pair_of_processes(
                    self._sides, self._pace, self._deadline, left, wanted, pairs
                )
            else:
                with self._deadline.stage("the last comparison"):
                    pairs.append(pair_of_runs(self._sides.baseline, self._sides.candidate, self._few, number))
                pairing = pairing_of_runs(pairs, self._few.pace)
        except TrialError:
            if len(self._groups) < max(self._least, LEAST_PROCESS_PAIRS):
                raise
            return False  # what the other pairs of processes have shown is worth no less for it
        self._new.append(pairing)
        self._add(pairs, pairing)
        return True

    def _compare_started(self) -> None:
        """Windows of processes that are there already; none where they end or fail, as they have done their work."""
        pairs: Pairs = []
        pairing = None
        windows_seconds = min(max(LEAST_SECONDS, self._available - self._spent), MOST_SECONDS)
        pace = replace(self._pace, seconds=windows_seconds, warm_steps=WARM_IN_STARTED)
        with self._deadline.stage("the last comparison"), contextlib.suppress(TrialError):
            pairing = compare_arms(*self._waiting.pop(0), pace, collected=pairs)
        if len(pairs) >= LEAST_WINDOWS:
            self._add(pairs, pairing)

    def _add(self, pairs: Pairs, pairing: Pairing | None) -> None:
        self._groups.append(pairs)
        if pairing is not None and pairing.mean_seconds is not None:
            self._means.append(pairing.mean_seconds)


def not_confirmed(found: Comparison, where: str = "") -> str:
    """What such a comparison shows of a gain that an earlier one had shown: 'not confirmed: x1.03 (0.98 to 1.08)'."""
    between = f" ({found.low:.2f} to {found.high:.2f})" if found.has_interval else ""
    verdict = "slower" if found.verdict == "slower" else "not confirmed"
    return f"{' '.join(filter(None, [verdict, where]))}: x{found.ratio:.2f}{between}"


def least_seconds(
    step_seconds: float,
    restart_seconds: float,
    trials: Trials,
    levers_start_seconds: float = 0.0,
    few: FewSteps | None = None,
    process_pairs: int = LEAST_PROCESS_PAIRS,
    started_pairs: int = 0,
) -> float:
    """Time for an interval that shows a large gain, from this many pairs of processes; usually the fewest that can
    differ.

    restart_seconds: of one of `trials`, which should be those that the comparison is made with.
    levers_start_seconds: what turning the levers on takes (compilation). few: as for the comparison. started_pairs: of
    them, those that have started already.
    """
    if few is not None:
        pair_seconds = few.pair_seconds(step_seconds, restart_seconds)
        return max(WANTED_PROCESS_PAIRS, few.pace.least_pairs) * (pair_seconds + levers_start_seconds)
    pace = Pace.for_step(step_seconds, seconds=0.0)
    steps = 2 * (WARM_IN_STARTED + pace.first_window) + 2 * LEAST_WINDOWS * pace.pair_steps
    starting = restart_seconds * (1 if trials.starts_overlap else 2) + levers_start_seconds
    starting += 2 * (pace.warm_steps - WARM_IN_STARTED) * step_seconds
    return (process_pairs - started_pairs) * starting + process_pairs * steps * step_seconds


def comparison_of_groups(groups: Sequence[Pairs], least_gain: float) -> Comparison:
    """Of all pairs, with an interval at least as wide as the variation between the groups implies."""
    every = [pair for group in groups for pair in group]
    whole = _compared(every, least_gain)
    if not whole.has_interval:
        return whole
    low, high = _interval([math.log(_compared(group, least_gain).ratio) for group in groups], math.log(whole.ratio))
    return whole.with_interval(min(whole.low, math.exp(low)), max(whole.high, math.exp(high)), least_gain)


def _interval(logs: Sequence[float], centre: float) -> tuple[float, float]:
    """95 % interval of the log ratio, given that of each pair of processes.

    The narrower of two: by what the pairs vary, and from the lowest to the highest that any of the pairs would give by
    itself. Two pairs that differ say little of how much pairs vary, but two large gains remain large.
    """
    together, alone = _half_width(logs), _half_width(logs[:1])
    apart = min(logs) - alone, max(logs) + alone
    if apart[1] - apart[0] < 2 * together:
        return apart
    return centre - together, centre + together


def _half_width(logs: Sequence[float]) -> float:
    """Of the 95 % interval of the log ratio, given that of each pair of processes."""
    mean, freedom = sum(logs) / len(logs), len(logs) - 1
    squares = sum((x - mean) ** 2 for x in logs)
    if not freedom or squares <= chi_square_95(freedom) * USUAL_DEVIATION**2:  # as typical pairs do, 19 of 20 times
        freedom += USUAL_FREEDOM
        squares += USUAL_FREEDOM * USUAL_DEVIATION**2
    return student_95(freedom) * math.sqrt(squares / freedom / len(logs))


def _is_narrow(found: Comparison, pairs: int, *, undecided: bool) -> bool:
    enough = NARROW_ENOUGH if undecided or pairs < MANY_PROCESS_PAIRS else NARROW_AFTER_MANY
    return pairs >= WANTED_PROCESS_PAIRS and found.has_interval and (found.high - found.low) / 2 <= enough * found.ratio


def _compared(pairs: Pairs, least_gain: float) -> Comparison:
    return compare_paired([pair[0] for pair in pairs], [pair[1] for pair in pairs], least_gain=least_gain)


def one_pair_of_processes(
    sides: Sides, pace: Pace, deadline: Deadline, seconds: float, wanted: int, pairs: Pairs
) -> tuple[Pairing, Pace]:
    """Long enough that `wanted` of them, or as many as fit, take `seconds`, starts included.

    Restarted, with shorter windows, where the script ends before there are enough.
    """
    for start in range(MOST_STARTS):
        before, began = len(pairs), deadline.elapsed_seconds
        try:
            with deadline.stage("the last comparison"), sides.together() as (plain, planned):
                starting = deadline.elapsed_seconds - began
                fitting = max(1, min(wanted, int(seconds / (starting + LEAST_SECONDS))))
                windows_seconds = min(seconds / fitting - starting, max(starting, MOST_SECONDS))
                return compare_arms(plain, planned, replace(pace, seconds=windows_seconds), collected=pairs), pace
        except TrialEnded as end:
            shorter = pace.within(end.steps)
            stuck = len(pairs) == before and shorter == pace
            if not end.by_itself or stuck or start == MOST_STARTS - 1:
                raise
            whole = len(pairs) - before - 1  # with one less, the script does not end first again
            pace = replace(shorter, most_pairs=max(pace.least_pairs, whole))
    raise AssertionError
