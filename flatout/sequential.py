"""Decide between two ways of running as soon as the samples allow it, and no sooner.

Testing a growing sample again and again, and stopping when it shows a difference, finds differences where there are
none. So there are few looks, and each requires more than 95 %: with the same level for all, as by Pocock (1977,
doi:10.1093/biomet/64.2.191), computed for looks after these numbers of pairs, the chance that any is wrong is 5 %, and
the intervals of all of them hold together (Jennison and Turnbull 1989, doi:10.1111/j.2517-6161.1989.tb01738.x). From
eight pairs on a look uses Wilcoxon's signed ranks; three to six pairs are too few for an interval by ranks, and get
Student's t, which a disturbed pair widens.

Stopping for futility is not bound by that: a candidate dropped too early costs a gain, never a wrong claim. Candidates
that continue to the last look are those whose gain may well be shown there.

    pairs = []
    while not is_decided(pairs, least_gain=0.01):
        pairs.append((baseline_seconds, candidate_seconds))     # taken in turns
    found = compare_so_far(pairs, least_gain=0.01)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import mean, median, stdev

from flatout.statistics import Comparison, compare_paired, with_logs

LOOKS = (3, 4, 6, 8, 11, 15, 22, 32, 48)
"""Pairs after which to look."""
LOOK_CONFIDENCE, OVERALL_CONFIDENCE = 0.9905, 0.95
"""Confidence of each look, and of all of them together."""
STUDENT = {3: 10.19, 4: 5.95, 5: 4.68, 6: 4.08, 7: 3.75}
"""Two-sided points of Student's t at that level, by pairs."""
LEAST_DEVIATION = 0.005
"""Of a log ratio: three windows may agree by chance; no machine is that steady."""
FAR_SLOWER_PAIRS, FAR_SLOWER_RATIO = 2, 0.75
"""The first pairs are enough if each is slower than this."""
FUTILE_RATIOS = {4: 1.0, 6: 1.005}
"""An estimate below that, after so many pairs, is unlikely to become a gain that counts."""
TREND_PAIRS, TREND_SHARE = 11, 0.5
"""From so many pairs on: an estimated gain of less than that share of what the last look can show, by the deviation
seen so far. If the estimate is right, the last look shows such a gain about one time in ten."""

Pairs = Sequence[tuple[float, float]]


def compare_so_far(pairs: Pairs, *, least_gain: float) -> Comparison:
    """What these pairs of (baseline, candidate) seconds show, with an interval that allows for all the looks."""
    baseline, candidate = zip(*pairs, strict=True)
    found = compare_paired(baseline, candidate, least_gain=least_gain, confidence=LOOK_CONFIDENCE)
    found = replace(found, confidence=OVERALL_CONFIDENCE)
    if len(pairs) in STUDENT:
        logs = [math.log(ours / theirs) for ours, theirs in pairs]
        half = STUDENT[len(pairs)] * max(stdev(logs), LEAST_DEVIATION) / math.sqrt(len(pairs))
        return with_logs(found, mean(logs), half, least_gain)
    if not found.has_interval and is_far_slower(pairs):
        return replace(found, verdict="slower", reason=None)
    return found


def is_decided(pairs: Pairs, *, least_gain: float, stop_if_futile: bool = True) -> bool:
    """True if no further pair is needed. `stop_if_futile` False: the figure itself is wanted."""
    if stop_if_futile and is_far_slower(pairs):
        return True
    if len(pairs) < LOOKS[-1] and len(pairs) not in LOOKS:
        return False
    found = compare_so_far(pairs, least_gain=least_gain)
    if len(pairs) >= LOOKS[-1] or found.verdict != "not significant":
        return True
    return stop_if_futile and (found.high < 1 + least_gain or is_futile(found, least_gain))


def pair_of_turns(turns: Pairs) -> tuple[float, float]:
    """One pair of (baseline, candidate) seconds from some short windows in turns: the median, and that over the median
    ratio.

    Disturbances last from a fraction of a millisecond to seconds. So the ratio of two neighbouring windows varies about
    as much for short windows as for long ones, and several short ones say more in the same time:
    with steps of 1.3 ms on a shared machine of two cores ±2.5 % after 5 s with windows of 0.15 s, ±1.0 % with windows
    of 0.02 s (`python -m benchmarks.search.windows`).
    """
    ours = median([one for one, _ in turns])
    return ours, ours / median([one / other for one, other in turns])


def is_far_slower(pairs: Pairs) -> bool:
    """So slow from the start that no interval is needed."""
    first = pairs[:FAR_SLOWER_PAIRS]
    return len(first) == FAR_SLOWER_PAIRS and all(ours / theirs < FAR_SLOWER_RATIO for ours, theirs in pairs)


def is_futile(found: Comparison, least_gain: float) -> bool:
    """Are more pairs unlikely to turn this estimate into a gain?"""
    if any(found.pairs >= least and found.ratio < bound for least, bound in FUTILE_RATIOS.items()):
        return True
    if found.pairs < TREND_PAIRS:
        return False
    half_at_last = math.log(found.high / found.low) / 2 * math.sqrt(found.pairs / LOOKS[-1])
    return math.log(found.ratio / (1 + least_gain)) < TREND_SHARE * half_at_last
