"""Scripts with so few steps that only whole runs can be compared.

Switching a lever on and off within one run takes steps: some to warm up, some to settle after a switch, and windows
that are long enough to be timed. Where a script has only a few, each side of a pair is a run of its own, in a new
process, from the end of the script's first step, where `flatout run` turns levers on, to the end of its last. The
start-up cost of a lever is part of such a run, as it is for the user.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from flatout.levers.lever import Choice
from flatout.script.trial.answers import TrialEnded
from flatout.sequential import LOOKS, is_decided
from flatout.tuning.windows import Arm, Pace, Pairing, compare_pairs, is_enough, raise_if_rolled_back, tried_in

FEWEST_STEPS = 12
"""A script with fewer has no room even for the shortest windows of quick steps."""
WANTED_PAIRS = 8
"""Pairs of long whole runs: the smallest number with a rank-based interval, which a single disturbed run does not widen
without bound."""

Start = Callable[[], AbstractContextManager[Arm]]
"""Starts a new run, waits for its first step, and ends it on exit."""


@dataclass(frozen=True, kw_only=True)
class FewSteps:
    """The length of a script whose runs are compared whole."""

    steps: int
    """Of the script."""
    compared: int
    """Steps after the first, at whose end a trial takes commands and `flatout run` turns levers on."""

    @property
    def pace(self) -> Pace:
        """Of pairs of runs."""
        return Pace(steps=self.compared, settle=0, warm_steps=0)

    def pair_seconds(self, step_seconds: float, restart_seconds: float) -> float:
        """Of a pair of runs, first steps included."""
        return 2 * (restart_seconds + self.compared * step_seconds)

    def least_seconds(self, step_seconds: float, restart_seconds: float) -> float:
        """Of the fewest pairs that can decide."""
        return LOOKS[0] * self.pair_seconds(step_seconds, restart_seconds)


def few_steps(end: TrialEnded, step_seconds: float | None) -> FewSteps | None:
    """The length of a script that has ended; None where windows fit into it, even of single long steps, or where the
    step time is unknown."""
    if step_seconds is None:
        return None
    few = FewSteps(steps=end.script_steps, compared=end.steps - 1)
    pace = Pace.for_step(step_seconds, seconds=0.0)
    if end.steps >= FEWEST_STEPS:
        pace = pace_within(pace, end.steps)
    return None if pace.fits(few.compared) else few


def pace_within(pace: Pace, total_steps: int) -> Pace:
    """The same, with shorter windows where a script of that length would not give a single pair otherwise."""
    return pace if pace.fits(total_steps - 1) else pace.within(total_steps)


def compare_whole_runs(
    baseline: Start,
    candidate: Start,
    few: FewSteps,
    pace: Pace,
    choice: Choice | None = None,
    has_time: Callable[[], bool] = lambda: False,
) -> Pairing:
    """Pairs of runs, until the verdict is clear, or `pace.seconds` or the pairs are used up. Seconds are per mean step.

    More pairs follow, up to eight, while every pair shows a gain and `has_time` allows another.

    Raises RolledBackInside where `choice` was taken back in its run, TrialEnded where a run is shorter than `few` says.
    """
    began = time.monotonic()
    pairs: list[tuple[float, float]] = []
    while not is_enough(pairs, pace, time.monotonic() - began) or (_is_promising(pairs, pace) and has_time()):
        pairs.append(pair_of_runs(baseline, candidate, few, len(pairs), choice))
    return pairing_of_runs(pairs, pace)


def _is_promising(pairs: Sequence[tuple[float, float]], pace: Pace) -> bool:
    """Of pairs that ran out of time without a verdict: is every one a gain? Three are few where runs differ."""
    if len(pairs) >= WANTED_PAIRS or is_decided(pairs, least_gain=pace.least_gain):
        return False
    return all(ours / theirs > 1 + pace.least_gain for ours, theirs in pairs)


def pair_of_runs(
    baseline: Start, candidate: Start, few: FewSteps, number: int, choice: Choice | None = None
) -> tuple[float, float]:
    """(baseline, candidate) seconds of a mean step. The second starts when the first has ended, since memory may only
    suffice for one. Which comes first alternates with the pair's number."""
    runs, arms = {}, {}
    for side in (baseline, candidate) if number % 2 == 0 else (candidate, baseline):
        with side() as arm:
            runs[side], arms[side] = arm.window(settle=0, steps=few.compared), arm
    raise_if_rolled_back(runs[candidate], tried_in(arms[candidate], arms[baseline], choice))
    ours, theirs = ((sum(run.seconds) + run.apply_seconds) / few.compared for run in (runs[baseline], runs[candidate]))
    return ours, theirs


def pairing_of_runs(pairs: list[tuple[float, float]], pace: Pace) -> Pairing:
    """The result of pairs of whole runs; start-up is part of them."""
    return Pairing.of(pairs, compare_pairs(pairs, pace), None)
