"""Plain against planned in fresh processes: the gain that a tune reports.

Several pairs of processes are started one after the other, each pair runs in alternating windows, and nothing but
what `flatout run` watches between its looks is on. The interval covers both what windows of one pair of processes
differ by and what pairs of processes differ by (where memory happens to lie costs some per cent for a whole run).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from flatout.levers.lever import Choice
from flatout.statistics import Comparison, compare_paired, median
from flatout.tune.deadline import TOLERANCE, Deadline
from flatout.tune.trial_process import TrialEnded, TrialProcess, TrialSetup
from flatout.tune.windows import Arm, Pace, Pairing, compare_arms

LEAST_PROCESS_PAIRS, MOST_PROCESS_PAIRS = 3, 8
NARROW_ENOUGH = 0.03
"""Half of the interval, as a share of the ratio: then no further pair of processes is started."""
LEAST_PAIRS, MOST_PAIRS = 4, 6
"""Windows of one pair of processes: the processes differ by more than their windows."""
MOST_STARTS = 40
"""A short script is started again until there are enough windows."""
STUDENT = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36}
"""Two-sided 95 % points of Student's t."""

Pairs = list[tuple[float, float]]


def compare_in_fresh_processes(
    setup: TrialSetup, choices: Sequence[Choice], pace: Pace, deadline: Deadline, seconds: float
) -> Pairing:
    """Takes about `seconds`, more where steps are so long that fewer windows would say nothing.

    Raises TrialError if a process fails, TrialEnded if the script is too short even for windows of one step.
    """
    pace = replace(
        pace,
        least_pairs=LEAST_PAIRS,
        most_pairs=MOST_PAIRS,
        seconds=seconds / MOST_PROCESS_PAIRS,
        stop_when_futile=False,
        stop_when_clear=False,
    )
    groups: list[Pairs] = []
    last: Pairing | None = None
    began = deadline.elapsed_seconds
    for _ in range(MOST_PROCESS_PAIRS):
        pairs: Pairs = []
        last, pace = _one_pair_of_processes(setup, choices, pace, deadline, pairs)
        groups.append(pairs)
        spent = deadline.elapsed_seconds - began
        few = len(groups) < LEAST_PROCESS_PAIRS  # whose interval says little: worth what a budget may be exceeded by
        tolerated = TOLERANCE * deadline.budget_seconds if few else 0.0
        if spent + spent / len(groups) > max(seconds, deadline.seconds_left + spent) + tolerated:
            break
        if len(groups) >= LEAST_PROCESS_PAIRS and _is_narrow(comparison_of_groups(groups, pace.least_gain)):
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
    if len(groups) < 2 or not whole.has_interval:
        return whole
    logs = [math.log(_compared(group, least_gain).ratio) for group in groups]
    mean = sum(logs) / len(logs)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in logs) / (len(logs) - 1))
    half = STUDENT[len(logs) - 1] * deviation / math.sqrt(len(logs))
    low, high = (min(whole.low, whole.ratio * math.exp(-half)), max(whole.high, whole.ratio * math.exp(half)))
    return whole.with_interval(low, high, least_gain)


def _is_narrow(found: Comparison) -> bool:
    return found.has_interval and (found.high - found.low) / 2 <= NARROW_ENOUGH * found.ratio


def _compared(pairs: Pairs, least_gain: float) -> Comparison:
    return compare_paired([pair[0] for pair in pairs], [pair[1] for pair in pairs], least_gain=least_gain)


def _one_pair_of_processes(
    setup: TrialSetup, choices: Sequence[Choice], pace: Pace, deadline: Deadline, pairs: Pairs
) -> tuple[Pairing, Pace]:
    """Started again where the script ends before there are enough pairs; then with windows that fit into it."""
    live = [choice for choice in choices if choice.lever.switch == "live"]
    from_start = [choice for choice in choices if choice.lever.switch != "live"]
    for start in range(MOST_STARTS):
        before = len(pairs)
        try:
            with (
                deadline.stage("the last comparison"),
                TrialProcess(setup, label="plain") as plain,
                TrialProcess(setup, from_start, label="planned") as planned,
            ):
                plain.spawn()
                planned.spawn()
                plain.start()
                planned.start()
                baseline, candidate = Arm(plain, resting=True), Arm(planned, live, resting=True)
                return compare_arms(baseline, candidate, pace, collected=pairs), pace
        except TrialEnded as end:
            shorter = pace.within(end.steps)
            stuck = len(pairs) == before and shorter == pace
            if end.status != 0 or stuck or start == MOST_STARTS - 1:
                raise
            pace = shorter
    raise AssertionError
