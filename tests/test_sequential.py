"""Decisions made early, and how often they are wrong."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from statistics import NormalDist, mean, stdev

import pytest

from flatout.sequential import FAR_SLOWER_PAIRS, LOOK_CONFIDENCE, LOOKS, STUDENT, compare_so_far, is_decided
from flatout.statistics import Comparison

LEAST_GAIN = 0.01


def decided(ratio: float, noise: Callable[[], float]) -> Comparison:
    pairs: list[tuple[float, float]] = []
    while not is_decided(pairs, least_gain=LEAST_GAIN):
        pairs.append((ratio * math.exp(noise()), 1.0))
    return compare_so_far(pairs, least_gain=LEAST_GAIN)


def disturbed(draw: random.Random, deviation: float) -> Callable[[], float]:
    """One pair in ten is off by ten times as much as the others are."""

    def noise() -> float:
        beyond = draw.choice((-1, 1)) * draw.expovariate(1 / (10 * deviation)) if draw.random() < 0.1 else 0.0
        return draw.gauss(0, deviation) + beyond

    return noise


@pytest.mark.parametrize("deviation", [0.01, 0.03, 0.08])
def test_what_does_nothing_is_hardly_ever_kept(deviation: float) -> None:
    draw = random.Random(1)
    quiet = [decided(1.0, lambda: draw.gauss(0, deviation)) for _ in range(400)]
    noisy = [decided(1.0, disturbed(draw, deviation)) for _ in range(400)]
    for found in (quiet, noisy):
        assert sum(one.verdict == "faster" for one in found) <= 10
        assert sum(one.low <= 1 <= one.high for one in found) >= 0.95 * 400
        assert sum(one.pairs for one in found) / 400 < 9  # given up in good time


@pytest.mark.parametrize(("gain", "share", "pairs"), [(0.05, 0.8, 10), (0.1, 0.95, 6), (0.3, 0.99, 4)])
def test_planted_gains_are_kept(gain: float, share: float, pairs: int) -> None:
    draw = random.Random(2)
    found = [decided(1 + gain, lambda: draw.gauss(0, 0.03)) for _ in range(400)]
    assert sum(one.verdict == "faster" for one in found) >= share * 400
    assert sum(one.pairs for one in found) / 400 <= pairs
    assert sum(one.low <= 1 + gain <= one.high for one in found) >= 0.95 * 400


def test_gains_are_kept_on_a_noisy_machine_too() -> None:
    """Pairs that differ by 9 % among themselves, as they were seen to on a busy machine of two cores."""
    draw = random.Random(3)
    shares = {}
    for gain in (0.0, 0.05, 0.1, 0.3):
        found = [decided(1 + gain, lambda: draw.gauss(0, 0.09)) for _ in range(300)]
        shares[gain] = sum(one.verdict == "faster" for one in found) / 300
    assert shares[0.0] <= 0.025
    assert shares[0.05] >= 0.4
    assert shares[0.1] >= 0.93
    assert shares[0.3] >= 0.99


def test_each_look_asks_for_as_much_as_all_of_them_together_need() -> None:
    """The level by Monte Carlo, and Student's points at that level by the ratio of a normal to its own deviation."""
    draw = random.Random(4)
    normal = NormalDist().inv_cdf((1 + LOOK_CONFIDENCE) / 2)
    wrong = 0
    for _ in range(2000):
        total, erred = 0.0, False
        for pair in range(1, LOOKS[-1] + 1):
            total += draw.gauss(0, 1)
            erred |= pair in LOOKS and abs(total) > normal * math.sqrt(pair)
        wrong += erred
    assert 0.035 <= wrong / 2000 <= 0.065
    for pairs, point in STUDENT.items():
        beyond = 0
        for _ in range(4000):
            few = [draw.gauss(0, 1) for _ in range(pairs)]
            beyond += abs(mean(few)) > point * stdev(few) / math.sqrt(pairs)
        assert beyond / 4000 <= 2 * (1 - LOOK_CONFIDENCE)


def test_what_is_far_slower_goes_at_once() -> None:
    found = compare_so_far([(0.56, 1.0)] * FAR_SLOWER_PAIRS, least_gain=LEAST_GAIN)
    assert is_decided([(0.56, 1.0)] * FAR_SLOWER_PAIRS, least_gain=LEAST_GAIN)
    assert (found.verdict, found.has_interval, found.pairs) == ("slower", False, FAR_SLOWER_PAIRS)
    assert not is_decided([(0.56, 1.0), (1.2, 1.0)], least_gain=LEAST_GAIN)


def test_where_the_figure_is_wanted_nothing_is_given_up() -> None:
    same = [(1.0, 1.0), (1.02, 1.0), (0.98, 1.0), (0.99, 1.0)]
    assert is_decided(same, least_gain=LEAST_GAIN)
    assert not is_decided(same, least_gain=LEAST_GAIN, stop_if_futile=False)
    assert is_decided([(1.0, 1.0)] * LOOKS[-1], least_gain=LEAST_GAIN, stop_if_futile=False)


def test_three_that_agree_are_no_proof_of_a_small_gain() -> None:
    found = compare_so_far([(1.02, 1.0)] * 3, least_gain=LEAST_GAIN)
    assert found.verdict == "not significant"
    assert found.has_interval
