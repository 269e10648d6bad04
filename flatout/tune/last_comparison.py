"""Plain against planned in fresh processes: the gain that a tune reports.

Several pairs of processes are started one after the other, each pair runs in alternating windows, and nothing but
what `flatout run` watches between its looks is on. Disturbances on a shared machine last a second or so, so each pair
is measured for as long as it took to start. The interval covers the variation between windows of one pair of processes
and the variation between pairs: memory placement costs a few per cent for a whole run, and far more in scripts with
large temporary tensors.

Two or three pairs are too few to estimate that variance, so it is shrunk towards a typical one, as in a moderated
t-test (Smyth 2004, doi:10.2202/1544-6115.1027), unless they contradict it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from flatout.levers.lever import Choice, split_by_switch
from flatout.statistics import STUDENT_95, Comparison, compare_paired, median
from flatout.tune.deadline import Deadline
from flatout.tune.trial_process import TrialEnded, TrialProcess, TrialSetup
from flatout.tune.windows import Arm, Pace, Pairing, compare_arms

WANTED_PROCESS_PAIRS, MOST_PROCESS_PAIRS = 3, 10
NARROW_ENOUGH = 0.03
"""Half of the interval, as a share of the ratio: then no further pair of processes is started."""
LEAST_SECONDS, MOST_SECONDS = 1.0, 6.0
"""Of windows in one pair of processes, where its start took less than the longer."""
FIRST_WINDOWS, LEAST_WINDOWS, MOST_WINDOWS = 6, 4, 400
"""Pairs of windows in the first pair of processes at the least, in a later one, and in any at the most."""
MOST_STARTS = 40
"""A short script is started again until there are enough windows."""
USUAL_DEVIATION, USUAL_FREEDOM = 0.04, 1
"""The typical standard deviation of the log ratio between pairs of processes, and the degrees of freedom it counts for.
`python -m benchmarks.gain.processes` measures it, and how often intervals from few pairs hold the ratio of all."""
MOST_USUAL = 1.5
"""Times the typical deviation: pairs that differ by more are not typical, and only their own deviation counts."""

Pairs = list[tuple[float, float]]


def compare_in_fresh_processes(
    setup: TrialSetup, choices: Sequence[Choice], pace: Pace, deadline: Deadline, seconds: float
) -> Pairing:
    """Takes about `seconds`, or what `deadline` leaves if that is more, until the interval is narrow.

    It takes longer where starts or steps are so long that fewer windows would say nothing.

    Raises TrialError if a process fails, TrialEnded if the script is too short even for windows of one step.
    """
    pace = replace(
        pace,
        least_pairs=FIRST_WINDOWS,
        least_pairs_when_slow=FIRST_WINDOWS,  # of one pair of processes fewer would give no interval
        most_pairs=MOST_WINDOWS,
        stop_when_futile=False,
        stop_when_clear=False,
    )
    groups: list[Pairs] = []
    last: Pairing | None = None
    began = deadline.elapsed_seconds
    available = max(seconds, deadline.seconds_left)
    for number in range(MOST_PROCESS_PAIRS):
        pairs: Pairs = []
        wanted, left = max(1, WANTED_PROCESS_PAIRS - number), available - (deadline.elapsed_seconds - began)
        last, pace = _one_pair_of_processes(setup, choices, pace, deadline, left, wanted, pairs)
        pace = replace(pace, least_pairs=LEAST_WINDOWS, least_pairs_when_slow=LEAST_WINDOWS)
        groups.append(pairs)
        spent = deadline.elapsed_seconds - began
        if spent + spent / len(groups) > available:
            break
        if len(groups) >= WANTED_PROCESS_PAIRS and _is_narrow(comparison_of_groups(groups, pace.least_gain)):
            break
    assert last is not None
    every = [pair for group in groups for pair in group]
    return replace(
        last,
        comparison=comparison_of_groups(groups, pace.least_gain),
        baseline_seconds=median([pair[0] for pair in every]),
        candidate_seconds=median([pair[1] for pair in every]),
        baseline_medians=tuple(pair[0] for pair in every),
        candidate_medians=tuple(pair[1] for pair in every),
    )


def comparison_of_groups(groups: Sequence[Pairs], least_gain: float) -> Comparison:
    """Of all pairs, with an interval that is at least as wide as the groups' own ratios say."""
    every = [pair for group in groups for pair in group]
    whole = _compared(every, least_gain)
    if not whole.has_interval:
        return whole
    half = _half_width([math.log(_compared(group, least_gain).ratio) for group in groups])
    low, high = (min(whole.low, whole.ratio * math.exp(-half)), max(whole.high, whole.ratio * math.exp(half)))
    return whole.with_interval(low, high, least_gain)


def _half_width(logs: Sequence[float]) -> float:
    """Of the 95 % interval of the log ratio, given that of each pair of processes."""
    mean, freedom = sum(logs) / len(logs), len(logs) - 1
    squares = sum((x - mean) ** 2 for x in logs)
    if squares <= freedom * (MOST_USUAL * USUAL_DEVIATION) ** 2:
        freedom += USUAL_FREEDOM
        squares += USUAL_FREEDOM * USUAL_DEVIATION**2
    return STUDENT_95[freedom] * math.sqrt(squares / freedom / len(logs))


@contextlib.contextmanager
def fresh_arms(setup: TrialSetup, choices: Sequence[Choice]) -> Iterator[tuple[Arm, Arm]]:
    """(plain, planned), both at their first step, watched as `flatout run` watches between its looks."""
    from_start, live = split_by_switch(choices)
    with (
        TrialProcess(setup, label="plain") as plain,
        TrialProcess(setup, from_start, label="planned") as planned,
    ):
        plain.spawn()  # both start at once, each on a core of its own
        planned.spawn()
        plain.start()
        planned.start()
        yield Arm(plain, resting=True), Arm(planned, live, resting=True)


def _is_narrow(found: Comparison) -> bool:
    return found.has_interval and (found.high - found.low) / 2 <= NARROW_ENOUGH * found.ratio


def _compared(pairs: Pairs, least_gain: float) -> Comparison:
    return compare_paired([pair[0] for pair in pairs], [pair[1] for pair in pairs], least_gain=least_gain)


def _one_pair_of_processes(
    setup: TrialSetup,
    choices: Sequence[Choice],
    pace: Pace,
    deadline: Deadline,
    seconds: float,
    wanted: int,
    pairs: Pairs,
) -> tuple[Pairing, Pace]:
    """So long that `wanted` of them, or as many as fit, take `seconds`, starts included.

    Started again where the script ends before there are enough windows; then with shorter ones.
    """
    for start in range(MOST_STARTS):
        before, began = len(pairs), deadline.elapsed_seconds
        try:
            with deadline.stage("the last comparison"), fresh_arms(setup, choices) as (plain, planned):
                starting = deadline.elapsed_seconds - began
                fitting = max(1, min(wanted, int(seconds / (starting + LEAST_SECONDS))))
                windows_seconds = min(seconds / fitting - starting, max(starting, MOST_SECONDS))
                return compare_arms(plain, planned, replace(pace, seconds=windows_seconds), collected=pairs), pace
        except TrialEnded as end:
            shorter = pace.within(end.steps)
            stuck = len(pairs) == before and shorter == pace
            if end.status != 0 or stuck or start == MOST_STARTS - 1:
                raise
            whole = len(pairs) - before - 1  # one less does not run into the end again
            pace = replace(shorter, most_pairs=max(pace.least_pairs, whole))
    raise AssertionError
