"""Is it faster? Medians, spread and comparisons that survive a noisy machine. Pure arithmetic, nothing measured here.

A shared machine drifts by tens of per cent within minutes and now and then runs 10x slow for seconds. Means and
t-tests break on both. So a comparison here works on ranks: it takes the logarithm of every ratio (a doubling and a
halving then weigh the same), estimates their centre by Hodges and Lehmann (the median of all pairwise averages: a
third of the samples may be garbage before it moves), and derives its confidence interval from the exact
distribution of Wilcoxon's signed ranks. `compare_paired` is for samples taken in turns (the drift hits both
sides of a pair and cancels); `compare_unpaired`, by Mann and Whitney, is for two separate runs; `compare_runs` is for
several runs of each side, each of which counts as one sample. Ranks of fewer than six pairs, or four runs a side,
give no 95 % interval; if there are no more, it is Student's (Welch's for runs), which a disturbed sample widens.

>>> compare_paired([1.10, 1.12, 9.0, 1.11, 1.10, 1.13, 1.12], [1.0, 1.01, 1.0, 1.0, 1.02, 1.01, 1.0]).verdict
'faster'
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from statistics import NormalDist, stdev
from typing import Literal

from flatout.decoding import decode
from flatout.errors import UsageError

Verdict = Literal["faster", "slower", "not significant"]

# Beyond this many pairs neighbours are merged into medians, as the pairwise averages grow with the square.
_MOST_PAIRS = 400
# Samples of one run share the drift of the machine: neighbours are not independent. So a long run
# counts as this many periods, and a run whose speed varied gets a wide interval.
_MOST_UNPAIRED = 30
# Up to this many the rank distribution is counted exactly; above, the normal approximation is good to a fraction of a
# rank.
_EXACT_PAIRS = 50
_EXACT_UNPAIRED = 20
_MOST_BINOMIAL = 500
_STUDENT_95 = (
    *(12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23),
    *(2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10, 2.09, 2.09),
)
"""By degrees of freedom, from 1 on."""
_LEAST_PAIRS = 3
"""Two pairs agree by chance too often."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How many times as fast the candidate is as the baseline, and how sure that is."""

    ratio: float  # baseline seconds / candidate seconds: 1.25 means the candidate needs 20 % less time
    low: float  # of the confidence interval; 0 and infinity where the samples are too few to give one
    high: float
    confidence: float
    pairs: int
    verdict: Verdict
    reason: str | None = None  # why the verdict is 'not significant'

    @property
    def has_interval(self) -> bool:
        return math.isfinite(self.high)

    def with_interval(self, low: float, high: float, least_gain: float) -> Comparison:
        """The same estimate with another interval, and the verdict that follows from that."""
        verdict, reason = _verdict(low, high, least_gain)
        return replace(self, low=low, high=high, verdict=verdict, reason=reason)

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "high": self.high if self.has_interval else None}

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> Comparison:
        return decode(cls, {**data, "high": math.inf if data["high"] is None else data["high"]})


def quantile(values: Sequence[float], fraction: float) -> float:
    """The value below which that fraction lies, interpolated linearly between neighbours."""
    if not values:
        raise UsageError("no samples", limit="a statistic needs at least one")
    ordered = sorted(values)
    position = fraction * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def median(values: Sequence[float]) -> float:
    """The middle value: robust as long as less than half of the samples are outliers."""
    return quantile(values, 0.5)


def iqr(values: Sequence[float]) -> float:
    """The interquartile range: the width of the middle half."""
    return quantile(values, 0.75) - quantile(values, 0.25)


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """Where the median of what was sampled lies, whatever its distribution; None: too few values for that confidence.

    Below 6 values even the whole range does not reach 95 %.
    """
    ordered, count = sorted(values), len(values)
    if count <= _MOST_BINOMIAL:
        cut = _exact_trim([math.comb(count, k) for k in range(count + 1)], confidence)
    else:
        cut = math.floor((count - _deviations(confidence) * math.sqrt(count)) / 2) - 1
    return None if cut is None else (ordered[cut], ordered[count - 1 - cut])


def compare_paired(
    baseline: Sequence[float], candidate: Sequence[float], *, least_gain: float = 0.01, confidence: float = 0.95
) -> Comparison:
    """Compare seconds taken in turns: the i-th of each belong together.

    'faster' if the whole interval lies above 1 + least_gain, 'slower' if it lies below 1.
    """
    if len(baseline) != len(candidate):
        raise UsageError(
            f"{len(baseline)} baseline and {len(candidate)} candidate samples",
            limit="a paired comparison needs the same number of both",
            remedy="use compare_unpaired for samples that were not taken in turns",
        )
    logs = [b - c for b, c in zip(_logs(baseline), _logs(candidate), strict=True)]
    merged = _merge_neighbours(logs, _MOST_PAIRS)
    averages = sorted((a + b) / 2 for i, a in enumerate(merged) for b in merged[i:])
    trim = _signed_rank_trim(len(merged), confidence)
    found = _judge(averages, trim, len(logs), least_gain, confidence)
    if trim is None and len(logs) >= _LEAST_PAIRS and confidence == 0.95:
        half = student_95(len(logs) - 1) * stdev(logs) / math.sqrt(len(logs))
        return with_logs(found, sum(logs) / len(logs), half, least_gain)
    return found


def with_logs(found: Comparison, centre: float, half: float, least_gain: float) -> Comparison:
    """The same with the interval centre ± half of the log ratio, widened to hold the estimate."""
    ratio = math.log(found.ratio)
    return found.with_interval(math.exp(min(centre - half, ratio)), math.exp(max(centre + half, ratio)), least_gain)


def student_95(freedom: int) -> float:
    """The two-sided 95 % point of Student's t; beyond 20 degrees of freedom that of 20, which is 7 % wider at most."""
    return _STUDENT_95[min(freedom, len(_STUDENT_95)) - 1]


def chi_square_95(freedom: int) -> float:
    """What a chi-square variable exceeds once in twenty times, by Wilson and Hilferty (1931): 2.5 % too low for one
    degree of freedom, less than 1 % from two on."""
    ninth = 2 / (9 * freedom)
    return freedom * (1 - ninth + 1.6449 * math.sqrt(ninth)) ** 3


def compare_unpaired(
    baseline: Sequence[float], candidate: Sequence[float], *, least_gain: float = 0.01, confidence: float = 0.95
) -> Comparison:
    """Compare seconds of two separate runs. Drift between the runs is not cancelled: prefer compare_paired."""
    before, after = (_merge_neighbours(_logs(side), _MOST_UNPAIRED) for side in (baseline, candidate))
    differences = sorted(b - c for b in before for c in after)
    trim = _rank_sum_trim(len(before), len(after), confidence)
    return _judge(differences, trim, min(len(baseline), len(candidate)), least_gain, confidence)


def compare_runs(baseline: Sequence[Sequence[float]], candidate: Sequence[Sequence[float]]) -> Comparison:
    """Compare several separate runs of each side: seconds of each run's steps. A run counts as one sample, its median.

    Steps of one run share the state of the machine, so however many there are, they do not show how much runs differ.
    Without an interval (low 0, high infinity) for fewer than 3 runs of a side.
    """
    before, after = ([median(run) for run in side] for side in (baseline, candidate))
    found = compare_unpaired(before, after)
    if found.has_interval:
        return found
    if min(len(before), len(after)) < _LEAST_PAIRS:
        counted = f"{len(before)} and {len(after)} runs are too few for {found.confidence:.0%} confidence"
        return replace(found, reason=f"{counted}: {_LEAST_PAIRS} of each side are needed")
    return with_logs(found, *_welch(_logs(before), _logs(after)), 0.01)


def _welch(before: Sequence[float], after: Sequence[float]) -> tuple[float, float]:
    """(difference of the means, half of its 95 % interval), after Welch (1947): the sides may spread differently."""
    parts = [stdev(side) ** 2 / len(side) for side in (before, after)]
    centre = sum(before) / len(before) - sum(after) / len(after)
    if not sum(parts):
        return centre, 0.0
    freedom = sum(parts) ** 2 / sum(
        part**2 / (len(side) - 1) for part, side in zip(parts, (before, after), strict=True)
    )
    return centre, student_95(math.floor(freedom)) * math.sqrt(sum(parts))


def _judge(ordered: Sequence[float], trim: int | None, pairs: int, least_gain: float, confidence: float) -> Comparison:
    """From the sorted log differences and how many to trim at each end (None: too few) to the verdict."""
    ratio = math.exp(median(ordered))
    low, high = (0.0, math.inf) if trim is None else (math.exp(ordered[trim]), math.exp(ordered[-1 - trim]))
    verdict, reason = _verdict(low, high, least_gain)
    if trim is None:
        counted = "1 sample is" if pairs == 1 else f"{pairs} samples are"
        reason = f"{counted} too few for {confidence:.0%} confidence"
    return Comparison(
        ratio=ratio, low=low, high=high, confidence=confidence, pairs=pairs, verdict=verdict, reason=reason
    )


def _verdict(low: float, high: float, least_gain: float) -> tuple[Verdict, str | None]:
    """(verdict, why it is 'not significant')."""
    if low > 1 + least_gain:
        return "faster", None
    if high < 1:
        return "slower", None
    if low > 1:
        return "not significant", f"the gain may be below the {least_gain:.1%} that counts"
    return "not significant", "the interval includes no change"


def _logs(seconds: Sequence[float]) -> list[float]:
    if not seconds:
        raise UsageError("no samples to compare", limit="a comparison needs some of each side")
    for value in seconds:
        if not (math.isfinite(value) and value > 0):
            raise UsageError(f"a sample of {value} seconds", limit="durations must be positive and finite")
    return [math.log(value) for value in seconds]


def _merge_neighbours(values: Sequence[float], most: int) -> list[float]:
    """At most that many values: medians of runs of equal length (a last, shorter run is left out)."""
    if len(values) <= most:
        return list(values)
    run = math.ceil(len(values) / most)
    return [median(values[start : start + run]) for start in range(0, len(values) - run + 1, run)]


@cache
def _signed_rank_trim(count: int, confidence: float) -> int | None:
    """How many pairwise averages to cut off at each end for that confidence; None if even cutting none is too few."""
    if count > _EXACT_PAIRS:
        mean = count * (count + 1) / 4
        deviation = math.sqrt(count * (count + 1) * (2 * count + 1) / 24)
        return math.floor(mean - _deviations(confidence) * deviation)
    ways = [1]  # ways[t]: in how many of the 2^count sign patterns the positive ranks sum to t
    for rank in range(1, count + 1):
        ways = [
            (ways[t] if t < len(ways) else 0) + (ways[t - rank] if t >= rank else 0) for t in range(len(ways) + rank)
        ]
    return _exact_trim(ways, confidence)


@cache
def _rank_sum_trim(before: int, after: int, confidence: float) -> int | None:
    """The same for the differences of two samples, from the distribution of Mann and Whitney's U."""
    if min(before, after) > _EXACT_UNPAIRED or before * after > 20 * _EXACT_UNPAIRED**2:
        mean = before * after / 2
        deviation = math.sqrt(before * after * (before + after + 1) / 12)
        trim = math.floor(mean - _deviations(confidence) * deviation)
        return trim if trim >= 0 else None
    return _exact_trim(_rank_sum_ways(before, after), confidence)


def _rank_sum_ways(before: int, after: int) -> list[int]:
    """ways[u]: how many orders of the two samples have u pairs out of order (a Gaussian binomial coefficient)."""
    ways = [1]
    for step in range(1, before + 1):  # multiply by (1 - x^(after + step)), then divide by (1 - x^step)
        product = ways + [0] * (after + step)
        for power in range(len(ways)):
            product[power + after + step] -= ways[power]
        for power in range(step, len(product)):
            product[power] += product[power - step]
        ways = product[: step * after + 1]
    return ways


def _exact_trim(ways: Sequence[int], confidence: float) -> int | None:
    """The largest k with P(statistic < k) within half of what may go wrong; None if that is k = 0 or less."""
    allowed = (1 - confidence) / 2 * sum(ways)
    below = trim = 0
    while below + ways[trim] <= allowed:
        below += ways[trim]
        trim += 1
    # Cutting `trim - 1` values at each end leaves the trim-th smallest as the lower end of the interval.
    return trim - 1 if trim else None


def _deviations(confidence: float) -> float:
    """How many standard deviations hold that share of a normal distribution (0.95 -> 1.96)."""
    return NormalDist().inv_cdf((1 + confidence) / 2)
