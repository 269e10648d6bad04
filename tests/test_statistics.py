import json
import math
import random
import statistics

import pytest

from flatout.errors import UsageError
from flatout.statistics import (
    Comparison,
    chi_square_95,
    compare_paired,
    compare_runs,
    compare_unpaired,
    iqr,
    median,
    quantile,
)


def test_median_and_iqr_known_answers() -> None:
    assert median([3, 1, 2]) == 2
    assert median([4, 1, 2, 3]) == 2.5
    assert iqr([1, 2, 3, 4, 5]) == 2
    assert quantile([10.0], 0.9) == 10
    with pytest.raises(UsageError, match="no samples"):
        median([])


def test_signed_rank_interval_known_answer() -> None:
    # For n = 6 at 95 % the tables give the extreme averages; for n = 10 the 9th from each end (critical value 8).
    from flatout.statistics import _signed_rank_trim

    assert [_signed_rank_trim(n, 0.95) for n in (5, 6, 7, 8, 9, 10, 20, 25)] == [None, 0, 2, 3, 5, 8, 52, 89]
    assert _signed_rank_trim(50, 0.95) == 434  # the normal approximation must join the exact counts smoothly
    assert _signed_rank_trim(51, 0.95) in (452, 453, 454)


def test_rank_sum_interval_known_answer() -> None:
    from flatout.statistics import _rank_sum_trim, _rank_sum_ways

    assert _rank_sum_ways(2, 2) == [1, 1, 2, 1, 1]
    tables = {(3, 3): None, (4, 4): 0, (5, 5): 2, (8, 8): 13, (10, 10): 23, (5, 10): 8, (20, 20): 127}
    assert {sizes: _rank_sum_trim(*sizes, 0.95) for sizes in tables} == tables


def test_chi_square_known_answers() -> None:
    for freedom, known in ((1, 3.841), (2, 5.991), (3, 7.815), (9, 16.919), (19, 30.144)):
        assert chi_square_95(freedom) == pytest.approx(known, rel=0.025)


def test_a_plain_gain_is_found_and_one_awful_sample_does_not_hide_it() -> None:
    baseline = [1.10, 1.12, 9.00, 1.11, 1.10, 1.13, 1.12, 1.11]
    candidate = [1.00, 1.01, 1.00, 1.00, 1.02, 1.01, 1.00, 9.0]
    found = compare_paired(baseline[:7], candidate[:7])
    assert found.verdict == "faster"
    assert found.low < 1.11 < found.high
    assert compare_paired(candidate[:7], baseline[:7]).verdict == "slower"
    assert compare_unpaired(baseline, candidate).verdict == "faster"


def test_exactly_equal_ratios_give_a_point() -> None:
    found = compare_paired([2.0] * 8, [1.0] * 8)
    assert found.ratio == pytest.approx(2)
    assert found.low == pytest.approx(found.high)
    assert found.verdict == "faster"


def test_too_few_pairs_are_never_significant() -> None:
    found = compare_paired([2.0, 2.1], [1.0] * 2)
    assert found.verdict == "not significant"
    assert (found.low, found.high) == (0.0, math.inf)
    assert not found.has_interval
    assert Comparison.from_json(json.loads(json.dumps(found.to_json(), allow_nan=False))) == found
    assert found.reason == "2 samples are too few for 95% confidence"


def test_three_to_five_pairs_get_students_interval() -> None:
    """Steps of half a second leave no time for more; ranks of five give no 95 % interval."""
    found = compare_paired([2.0, 2.1, 2.2, 2.0, 2.4], [1.0] * 5)
    assert found.verdict == "faster"
    logs = [math.log(value) for value in (2.0, 2.1, 2.2, 2.0, 2.4)]
    half = 2.776 * statistics.stdev(logs) / 5**0.5
    assert (math.log(found.low), math.log(found.high)) == pytest.approx(
        (sum(logs) / 5 - half, sum(logs) / 5 + half), abs=1e-3
    )
    assert compare_paired([2.0, 2.1, 19.0], [1.0] * 3).verdict == "not significant"


@pytest.mark.parametrize(("stalls", "least"), [(0.0, 0.03), (0.1, 0.0)])
@pytest.mark.parametrize("pairs", [3, 4, 5])
def test_students_interval_holds_as_often_as_it_says(pairs: int, stalls: float, least: float) -> None:
    """At least as often where one window in ten stalls: an outlier widens it."""
    source = random.Random(3)

    def log_ratio() -> float:
        stall = source.choice([-1, 1]) * source.uniform(0.3, 2.3) if source.random() < stalls else 0.0
        return source.gauss(0, 0.1) + stall

    wrong = 0
    for _ in range(2000):
        found = compare_paired([math.exp(log_ratio()) for _ in range(pairs)], [1.0] * pairs)
        wrong += not found.low <= 1 <= found.high
    assert least < wrong / 2000 < 0.07


def test_a_gain_below_the_least_that_counts_is_not_called_faster() -> None:
    found = compare_paired([1.005] * 20, [1.0] * 20, least_gain=0.01)
    assert found.verdict == "not significant"
    assert "0" in (found.reason or "")
    assert compare_paired([1.005] * 20, [1.0] * 20, least_gain=0.001).verdict == "faster"


def test_bad_samples_are_refused() -> None:
    with pytest.raises(UsageError, match="the same number of both"):
        compare_paired([1.0], [1.0, 2.0])
    with pytest.raises(UsageError, match="positive and finite"):
        compare_paired([0.0], [1.0])
    with pytest.raises(UsageError, match="no samples"):
        compare_unpaired([], [1.0])


def test_a_comparison_survives_json() -> None:
    found = compare_paired([2.0] * 8, [1.0] * 8)
    assert Comparison.from_json(found.to_json()) == found


def _noisy(rng: random.Random, seconds: float, drift: float) -> float:
    """Log-normal jitter on a drifting machine; one sample in twelve is up to 10x slow."""
    stall = rng.uniform(2, 10) if rng.random() < 1 / 12 else 1.0
    return seconds * drift * stall * rng.lognormvariate(0, 0.03)


def _pairs(rng: random.Random, gain: float, count: int) -> tuple[list[float], list[float]]:
    drifts = [rng.uniform(0.7, 1.5) for _ in range(count)]
    return [_noisy(rng, gain, d) for d in drifts], [_noisy(rng, 1.0, d) for d in drifts]


@pytest.mark.parametrize("count", [8, 15, 30])
def test_no_gain_is_rarely_called_one(count: int) -> None:
    rng = random.Random(count)
    verdicts = [compare_paired(*_pairs(rng, 1.0, count)).verdict for _ in range(400)]
    assert sum(v != "not significant" for v in verdicts) / len(verdicts) <= 0.07


def test_a_true_gain_of_five_per_cent_is_found_amid_noise() -> None:
    rng = random.Random(5)
    found = [compare_paired(*_pairs(rng, 1.05, 40)) for _ in range(200)]
    assert sum(c.verdict == "faster" for c in found) / len(found) > 0.8
    assert sum(c.low <= 1.05 <= c.high for c in found) / len(found) > 0.9


def test_unpaired_is_rarely_wrong_and_finds_gains_without_drift() -> None:
    rng = random.Random(7)

    def verdict(gain: float) -> str:
        return compare_unpaired(
            [_noisy(rng, gain, 1.0) for _ in range(25)], [_noisy(rng, 1.0, 1.0) for _ in range(25)]
        ).verdict

    assert sum(verdict(1.0) != "not significant" for _ in range(300)) / 300 <= 0.07
    assert sum(verdict(1.05) == "faster" for _ in range(100)) > 80


def test_many_samples_stay_affordable_and_right() -> None:
    rng = random.Random(11)
    found = compare_paired(*_pairs(rng, 1.05, 20_000))
    assert found.verdict == "faster"
    assert found.pairs == 20_000
    assert found.ratio == pytest.approx(1.05, rel=0.005)


def _wandering(rng: random.Random, count: int) -> list[float]:
    """A run whose speed wanders slowly: neighbours share their noise."""
    drift, found = 0.0, []
    for _ in range(count):
        drift = 0.995 * drift + rng.gauss(0, 0.01)
        found.append(2.718281828**drift)
    return found


def test_unpaired_does_not_count_neighbours_as_independent_witnesses() -> None:
    rng = random.Random(13)
    verdicts = [compare_unpaired(_wandering(rng, 3000), _wandering(rng, 3000)).verdict for _ in range(150)]
    assert sum(v != "not significant" for v in verdicts) / len(verdicts) < 0.35  # counting each: above 0.8


def runs_of(rng: random.Random, seconds: float, runs: int, *, between: float = 0.02) -> list[list[float]]:
    """Each run at a speed of its own, its steps much nearer to one another than the runs are."""
    speeds = [seconds * rng.lognormvariate(0, between) for _ in range(runs)]
    return [[speed * rng.lognormvariate(0, 0.002) for _ in range(30)] for speed in speeds]


def test_runs_not_steps_are_the_samples() -> None:
    baseline, candidate = [[1.0] * 50, [1.1] * 50, [0.9] * 50], [[1.05] * 50, [0.95] * 50, [1.0] * 50]
    found = compare_runs(baseline, candidate)
    assert (found.verdict, found.pairs) == ("not significant", 3)
    assert found.low < 0.9 < 1.1 < found.high


@pytest.mark.parametrize("runs", [3, 4, 6])
def test_equal_code_is_seldom_called_different(runs: int) -> None:
    """95 % intervals: of 400 pairs of sides with the same true speed, about 20 at most exclude a ratio of 1."""
    rng = random.Random(runs)
    sides = [(runs_of(rng, 1.0, runs), runs_of(rng, 1.0, runs)) for _ in range(400)]
    missed = sum(not (found.low <= 1 <= found.high) for found in (compare_runs(*two) for two in sides))
    assert missed <= 30
    # steps as samples, as if they were independent: a single run of each side hides what differs between runs
    alone = [compare_unpaired(baseline[0], candidate[0]) for baseline, candidate in sides]
    assert sum(not (found.low <= 1 <= found.high) for found in alone) > 200


def test_three_runs_show_a_large_slowdown_and_two_show_nothing() -> None:
    rng = random.Random(0)
    found = compare_runs(runs_of(rng, 1.0, 3), runs_of(rng, 1.3, 3))
    assert (found.verdict, found.has_interval) == ("slower", True)
    assert found.low < 1 / 1.3 < found.high
    few = compare_runs(runs_of(rng, 1.0, 2), runs_of(rng, 1.3, 5))
    assert (few.verdict, few.has_interval) == ("not significant", False)
    assert few.reason == "2 and 5 runs are too few for 95% confidence: 3 of each side are needed"


def test_welch_interval_known_answer() -> None:
    """Logarithms (1, 2, 3) and (2, 4, 6): difference of means -2, standard error sqrt(1/3 + 4/3), 2.94 degrees of
    freedom, counted as 2."""
    found = compare_runs([[math.e**x] for x in (1, 2, 3)], [[math.e**x] for x in (2, 4, 6)])
    half = 4.30 * math.sqrt(5 / 3)
    assert math.log(found.low) == pytest.approx(-2 - half)
    assert math.log(found.high) == pytest.approx(-2 + half)
    still = compare_runs([[2.0]] * 3, [[1.0]] * 3)
    assert (still.low, still.high) == (pytest.approx(2), pytest.approx(2))
