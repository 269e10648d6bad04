"""Two ways to run the same inputs, timed in turns until the verdict is clear or the time is used up."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from flatout.statistics import Comparison, compare_paired, median
from flatout.timing import Clock, interleave

WINDOW_SECONDS = 0.15
"""Shorter runs are repeated within a window: long against a stall of the scheduler, short against the machine's
drift."""
MOST_RUNS = 200
FUTILE = (0.97, 1.005)
"""After 5 pairs an estimate in this range will hardly become a gain that counts."""
HOPELESS = {3: 0.7, 5: 0.85}
"""After so many pairs, each slower than this: fewer may all have met somebody else's work."""
EARLY_CONFIDENCE, CONFIDENCE = 0.98, 0.95
STAGES = (3, 5, 6, 8, 11, 15)
"""Pairs after which to look whether more are needed."""
LEAST_PAIRS = 6
"""Fewer show nothing with 95 % confidence: where a gain is in sight they are made, whatever the time."""
PROMISING = 1.1
STAGES_FINAL = (6, 8, 11, 15, 21)


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

    final: no giving up early, as the figure itself is wanted.
    """
    began = clock()
    runs = _runs_per_window(candidate, clock)
    pairs: list[tuple[float, float]] = []
    functions = {"baseline": _repeated(baseline, runs), "candidate": _repeated(candidate, runs)}
    for stage in STAGES_FINAL if final else STAGES:
        found = interleave(functions, stage - len(pairs), warmup=0, clock=clock)
        ours, theirs = (found[name].samples_seconds for name in ("baseline", "candidate"))
        pairs += zip((one / runs for one in ours), (one / runs for one in theirs), strict=True)
        spent = clock() - began
        if (not final and _futile(pairs, least_gain)) or _decided(pairs, least_gain):
            break
        if spent > seconds and (len(pairs) >= LEAST_PAIRS or not _promising(pairs)):
            break
    return Turns(
        comparison=_compare(pairs, least_gain, CONFIDENCE),
        baseline_seconds=median([ours for ours, _ in pairs]),
        candidate_seconds=median([theirs for _, theirs in pairs]),
    )


def _compare(pairs: list[tuple[float, float]], least_gain: float, confidence: float) -> Comparison:
    ours, theirs = zip(*pairs, strict=True)
    return compare_paired(ours, theirs, least_gain=least_gain, confidence=confidence)


def _futile(pairs: list[tuple[float, float]], least_gain: float) -> bool:
    best = max(ours / theirs for ours, theirs in pairs)
    if any(len(pairs) >= least and best < ratio for least, ratio in HOPELESS.items()):
        return True
    low, high = FUTILE
    return len(pairs) >= 5 and low < _compare(pairs, least_gain, CONFIDENCE).ratio < high


def _promising(pairs: list[tuple[float, float]]) -> bool:
    return median([ours / theirs for ours, theirs in pairs]) > PROMISING


def _decided(pairs: list[tuple[float, float]], least_gain: float) -> bool:
    if len(pairs) < 7:
        return False
    early = _compare(pairs, least_gain, EARLY_CONFIDENCE)
    return early.verdict != "not significant" or early.high < 1 + least_gain


def _runs_per_window(run: Callable[[], object], clock: Clock) -> int:
    start = clock()
    run()
    return max(1, min(MOST_RUNS, round(WINDOW_SECONDS / max(clock() - start, 1e-9))))


def _repeated(run: Callable[[], object], runs: int) -> Callable[[], object]:
    def window() -> None:
        for _ in range(runs):
            run()

    return window
