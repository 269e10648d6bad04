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
from flatout.statistics import Comparison, chi_square_95, compare_paired, student_95
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
MOST_STARTS = 40
"""A short script is restarted until there are enough windows."""
USUAL_DEVIATION, USUAL_FREEDOM = 0.04, 1
"""The typical standard deviation of the log ratio between pairs of processes, and the degrees of freedom it counts for.
`python -m benchmarks.gain.processes` measures it, and how often intervals from few pairs hold the ratio of all."""


Pairs = list[tuple[float, float]]


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
    started: tuple[Arm, Arm] | None = None,
) -> Pairing:
    """Takes about `seconds`, or what `deadline` leaves if that is more, until the interval is narrow.

    Takes longer where starts or steps are so long that fewer windows would prove nothing. few: the script's length,
    where whole runs are compared; the length of windows does not matter then. started: a pair of processes that have
    started already, which is used where time is too short for the fewest new pairs.

    Raises TrialError if a process fails, TrialEnded if the script is too short even for windows of one step.
    """
    pace = replace(
        pace, least_pairs=LEAST_WINDOWS, most_pairs=MOST_WINDOWS, counts_warm_up=True, stops_when_decided=False
    )
    least = 1 if few is None else few.pace.least_pairs
    groups: list[Pairs] = []
    made: list[Pairing] = []
    began = deadline.elapsed_seconds
    left_at_first = deadline.seconds_left
    available = max(seconds, left_at_first)

    def may_go_on(new_pairs: int) -> bool:
        """Is there time for one more new pair?"""
        spent, found = deadline.elapsed_seconds - began, comparison_of_groups(groups, pace.least_gain)
        most = available
        too_few = len(groups) < LEAST_PROCESS_PAIRS
        if _is_undecided(found, pace) and not (too_few and started):
            share = LARGE_UNDECIDED_SHARE if found.ratio > LARGE_GAIN else UNDECIDED_SHARE
            most += share * deadline.budget_seconds
            if too_few:
                beyond = SECOND_PAIR_SHARE if found.ratio > NOTABLE_GAIN else LEAST_SHARE_BEYOND
                most = max(most, left_at_first + beyond * deadline.budget_seconds)
        return len(groups) < least or spent + spent / new_pairs <= most

    for number in range(MOST_PROCESS_PAIRS):
        pairs: Pairs = []
        wanted, left = max(1, WANTED_PROCESS_PAIRS - number), available - (deadline.elapsed_seconds - began)
        try:
            if few is None:
                pairing, pace = one_pair_of_processes(sides, pace, deadline, left, wanted, pairs)
            else:
                with deadline.stage("the last comparison"):
                    pairs.append(pair_of_runs(sides.baseline, sides.candidate, few, number))
                pairing = pairing_of_runs(pairs, few.pace)
        except TrialError:
            if len(groups) < max(least, LEAST_PROCESS_PAIRS):
                raise
            break  # what the other pairs of processes have shown is worth no less for it
        groups.append(pairs)
        made.append(pairing)
        found = comparison_of_groups(groups, pace.least_gain)
        too_few = _is_undecided(found, pace) and len(groups) < LEAST_PROCESS_PAIRS
        if too_few and started is not None and not may_go_on(number + 1):
            left = available - (deadline.elapsed_seconds - began)
            windows_seconds = min(max(LEAST_SECONDS, left), MOST_SECONDS)
            groups += _of_started(started, replace(pace, seconds=windows_seconds), deadline)
            found, started = comparison_of_groups(groups, pace.least_gain), None
        if not may_go_on(number + 1) or _is_narrow(found, len(groups), undecided=_is_undecided(found, pace)):
            break
    every = [pair for group in groups for pair in group]
    means = [one.mean_seconds for one in made if one.mean_seconds is not None]
    return replace(
        Pairing.of(every, comparison_of_groups(groups, pace.least_gain), made[-1].startup_seconds),
        peak_resident_bytes=made[-1].peak_resident_bytes,
        mean_seconds=mean_of_each(means) if means else None,
    )


def not_confirmed(found: Comparison, where: str = "") -> str:
    """What such a comparison shows of a gain that an earlier one had shown: 'not confirmed: x1.03 (0.98 to 1.08)'."""
    between = f" ({found.low:.2f} to {found.high:.2f})" if found.has_interval else ""
    verdict = "slower" if found.verdict == "slower" else "not confirmed"
    return f"{' '.join(filter(None, [verdict, where]))}: x{found.ratio:.2f}{between}"


def _is_undecided(found: Comparison, pace: Pace) -> bool:
    return found.verdict == "not significant" and found.ratio > 1 + pace.least_gain


def _of_started(arms: tuple[Arm, Arm], pace: Pace, deadline: Deadline) -> list[Pairs]:
    """Windows of processes that are there already; none where they end or fail, as they have done their work."""
    pairs: Pairs = []
    with deadline.stage("the last comparison"), contextlib.suppress(TrialError):
        compare_arms(*arms, pace, collected=pairs)
    return [pairs] if len(pairs) >= LEAST_WINDOWS else []


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
    steps = 2 * (pace.warm_steps + pace.first_window) + 2 * LEAST_WINDOWS * pace.pair_steps
    starting = restart_seconds * (1 if trials.starts_overlap else 2)
    new_pairs = process_pairs - started_pairs
    return new_pairs * (starting + levers_start_seconds) + process_pairs * steps * step_seconds


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
