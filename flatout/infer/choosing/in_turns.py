"""Two ways to run the same inputs, timed alternately until the result is clear or the time is up."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from flatout.sequential import FAR_SLOWER_PAIRS, LOOKS, compare_so_far, is_decided, pair_of_turns
from flatout.statistics import Comparison, median
from flatout.timing import Clock, interleave

WINDOW_SECONDS, PAIR_SECONDS = 0.03, 0.15
"""Shorter runs are repeated within a window, and shorter windows taken in turns within a pair: see
`flatout.sequential.pair_of_turns`."""
MOST_RUNS = 200
MOST_TURNS = 6
FINAL_LOOKS = LOOKS[LOOKS.index(6) :]
"""Fewer pairs decide, but their intervals are wide."""


@dataclass(frozen=True, kw_only=True)
class Turns:
    """What the windows gave, in seconds of one run of the sample."""

    comparison: Comparison
    baseline_seconds: float
    candidate_seconds: float


def in_turns(
    baseline: Callable[[], object],
    candidate: Callable[[], object],
    *,
    seconds: float,
    least_gain: float = 0.01,
    final: bool = False,
    clock: Clock = time.perf_counter,
) -> Turns:
    """Compare the two, both already warm. `seconds` bounds it once there are enough pairs for a verdict.

    final: never stop early for futility, since the ratio itself is reported.
    """
    began = clock()
    runs, turns = _runs_and_turns(candidate, clock)
    pairs: list[tuple[float, float]] = []
    functions = {"baseline": _repeated(baseline, runs), "candidate": _repeated(candidate, runs)}
    for look in FINAL_LOOKS if final else (FAR_SLOWER_PAIRS, *LOOKS):
        found = interleave(functions, turns * (look - len(pairs)), warmup=0, clock=clock)
        ours, theirs = ([one / runs for one in found[name].samples_seconds] for name in ("baseline", "candidate"))
        taken = list(zip(ours, theirs, strict=True))
        pairs += [pair_of_turns(taken[at : at + turns]) for at in range(0, len(taken), turns)]
        if is_decided(pairs, least_gain=least_gain, stop_if_futile=not final):
            break
        if clock() - began > seconds and look >= LOOKS[0]:
            break
    return Turns(
        comparison=compare_so_far(pairs, least_gain=least_gain),
        baseline_seconds=median([ours for ours, _ in pairs]),
        candidate_seconds=median([theirs for _, theirs in pairs]),
    )


def _runs_and_turns(run: Callable[[], object], clock: Clock) -> tuple[int, int]:
    """How many runs a window has, and how many windows of each a pair."""
    start = clock()
    run()
    seconds = max(clock() - start, 1e-9)
    runs = max(1, min(MOST_RUNS, round(WINDOW_SECONDS / seconds)))
    return runs, max(1, min(MOST_TURNS, round(PAIR_SECONDS / (runs * seconds))))


def _repeated(run: Callable[[], object], runs: int) -> Callable[[], object]:
    def window() -> None:
        for _ in range(runs):
            run()

    return window
