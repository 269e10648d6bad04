"""Guessing where it pays, and next to nothing lost where it does not: simulated, the clock included."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from flatout.infer.generation.throttle import MOST_WAIT, RENEWAL, SIZES, Throttle

PLAIN = 0.010


@dataclass
class Machine:
    """Seconds of a pass with k guesses, and what the clock shows of them."""

    slope: float  # of a plain pass, per guess
    noise: float = 0.05
    spikes: float = 0.02  # share of passes that take ten times as long
    first: float = 20.0  # times as long takes the first pass of a size

    def true_seconds(self, guesses: int) -> float:
        return PLAIN * (1 + self.slope * guesses)

    def shown_seconds(self, guesses: int, chance: random.Random, *, first: bool) -> float:
        seconds = self.true_seconds(guesses) * chance.lognormvariate(0, self.noise)
        return seconds * (self.first if first else 10 if chance.random() < self.spikes else 1)


Likeliness = Callable[[int], float]
"""How likely a guess is right, by the number of tokens generated."""


def speedup(likely: Likeliness, machine: Machine, tokens: int, seed: int, fixed: int | None = None) -> float:
    """Of a throttled generation over plain passes, in true seconds; `fixed`: of always so many guesses."""
    chance = random.Random(seed)
    throttle, seen = Throttle(), set[int]()
    seconds, made = 0.0, 0
    while made < tokens:
        guesses = throttle.choose() if fixed is None else fixed
        accepted = 0
        while accepted < guesses and chance.random() < likely(made + accepted):
            accepted += 1
        seconds += machine.true_seconds(guesses)
        throttle.observe(guesses, accepted, machine.shown_seconds(guesses, chance, first=guesses not in seen))
        seen.add(guesses)
        made += accepted + 1
    return made * PLAIN / seconds


@pytest.mark.parametrize("tokens", [64, 200, 2000])
@pytest.mark.parametrize("slope", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.1])
def test_a_text_that_cannot_be_guessed_is_hardly_slower(share: float, slope: float, tokens: int) -> None:
    ratios = sorted(speedup(lambda _: share, Machine(slope), tokens, seed) for seed in range(15))
    assert ratios[7] >= 0.97
    assert ratios[1] > 0.96  # the worst but one of fifteen, chance and spikes against it


@pytest.mark.parametrize("tokens", [200, 2000])
@pytest.mark.parametrize("share", [0.0, 0.1])
def test_nor_where_a_guess_costs_as_much_as_a_token(share: float, tokens: int) -> None:
    ratios = sorted(speedup(lambda _: share, Machine(1.0, first=1), tokens, seed) for seed in range(15))
    assert ratios[7] > 0.975
    assert ratios[1] > 0.97


@pytest.mark.parametrize("slope", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("share", [0.7, 0.9, 1.0])
def test_a_repetitive_text_gets_nearly_all_there_is(share: float, slope: float) -> None:
    machine = Machine(slope)
    best = max(speedup(lambda _: share, machine, 4000, 0, fixed=size) for size in (0, *SIZES))
    ratios = sorted(speedup(lambda _: share, machine, 1000, seed) for seed in range(9))
    assert ratios[4] > 0.85 * best
    assert ratios[1] > 0.7 * best


def test_short_repetitive_texts_gain_too() -> None:
    ratios = sorted(speedup(lambda _: 0.95, Machine(0.1), 100, seed) for seed in range(9))
    assert ratios[4] > 2


def test_what_never_pays_is_never_kept_on() -> None:
    """A draft so slow that even perfect guesses cost as much as they bring."""
    ratios = sorted(speedup(lambda _: 1.0, Machine(1.0), 1000, seed) for seed in range(9))
    assert ratios[0] > 0.97


def test_a_text_that_becomes_repetitive_is_noticed_and_one_that_ceases_too() -> None:
    def likely(made: int) -> float:
        return 0.95 if 1000 <= made < 2000 else 0.02

    ratios = sorted(speedup(likely, Machine(0.1), 3000, seed) for seed in range(9))
    ideal = 3000 / (2000 + 1000 / 3.7)  # plain, but the middle at the best size's rate
    assert ratios[4] > 0.85 * ideal


def test_a_bad_clock_is_outlived() -> None:
    machine = Machine(0.1, noise=0.2, spikes=0.1, first=500)
    assert sorted(speedup(lambda _: 0.9, machine, 1500, seed) for seed in range(9))[4] > 2
    assert sorted(speedup(lambda _: 0.02, machine, 1500, seed) for seed in range(9))[1] > 0.96


def plain_passes(throttle: Throttle, count: int) -> int:
    """How many plain passes until it wants to guess, at most `count`."""
    for passes in range(count):
        if throttle.choose():
            return passes
        throttle.observe(0, 0, PLAIN)
    return count


def test_tries_become_rare() -> None:
    throttle, waits = Throttle(), []
    for _ in range(9):
        waits.append(plain_passes(throttle, 1000))
        assert throttle.choose() == SIZES[0]
        assert throttle.choose() == SIZES[0]  # asking changes nothing
        throttle.observe(SIZES[0], 0, PLAIN * 1.15)
        assert not throttle.on
    assert waits == [4, 8, 16, 32, 64, 128, 128, 128, 128]
    assert max(waits) == MOST_WAIT


def test_a_try_waits_for_something_to_guess() -> None:
    throttle = Throttle()
    plain_passes(throttle, 10)
    for _ in range(20):
        throttle.observe(0, 0, PLAIN)  # the proposer had nothing to propose
    assert throttle.choose() == SIZES[0]


def test_plain_passes_are_renewed_while_guessing() -> None:
    throttle = Throttle()
    plain_passes(throttle, 10)
    chosen = []
    for _ in range(4 * RENEWAL):
        guesses = throttle.choose()
        chosen.append(guesses)
        throttle.observe(guesses, guesses, PLAIN * (1 + 0.05 * guesses))
    assert throttle.on
    assert chosen.count(0) == 3
    assert chosen[-1] == SIZES[-1]


def test_fewer_guesses_than_asked_for_count_as_the_next_size() -> None:
    throttle = Throttle()
    plain_passes(throttle, 10)
    for _ in range(6):
        throttle.observe(3, 3, PLAIN * 1.5)
    assert throttle.expected_seconds(4) == pytest.approx(PLAIN * 1.5)
    assert throttle.expected_tokens(2) > 2.5


def test_rows_of_a_batch_share_the_pass() -> None:
    """Half of the rows can be guessed: a pass brings a row as much as the mean of them, and only that counts."""
    for slope, pays in ((0.1, True), (1.2, False)):
        throttle = Throttle()
        plain_passes(throttle, 10)
        for _ in range(40):
            guesses = throttle.choose()
            throttle.observe(guesses, [guesses, 0, guesses, 0], PLAIN * (1 + slope * guesses))
        assert throttle.on is pays
        if pays:
            assert throttle.expected_tokens(2) == pytest.approx(2, abs=0.2)
