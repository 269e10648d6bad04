"""Only what goes on growing is growth; jumps, filling up and scatter are not."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from flatout.script.growth import steady_growth

MIB = 1 << 20


def samples(size: Callable[[int], float], count: int = 60) -> list[tuple[float, int, int]]:
    """One a second, five steps each."""
    return [(float(second), 5 * second, int(size(second))) for second in range(count)]


def test_a_leak_is_told_by_the_clock_and_by_the_step() -> None:
    scatter = random.Random(0)
    growth = steady_growth(samples(lambda second: 900 * MIB + second * MIB + scatter.random() * 4 * MIB))
    assert growth is not None
    assert growth.bytes_per_hour == pytest.approx(3600 * MIB, rel=0.1)
    assert growth.bytes_per_step == pytest.approx(MIB / 5, rel=0.1)


@pytest.mark.parametrize(
    "size",
    [
        lambda second: 900 * MIB,
        lambda second: 900 * MIB + 300 * MIB * (second > 40),  # one jump
        lambda second: 900 * MIB + 300 * MIB * (1 - math.exp(-second / 12)),  # an allocator fills up
        lambda second: 900 * MIB + 200 * MIB * (second % 7),  # now more, now less
        lambda second: 900 * MIB + second * 0.2 * MIB,  # 12 MiB in all
    ],
    ids=["flat", "jump", "fills-up", "saw", "little"],
)
def test_other_changes_are_no_growth(size: Callable[[int], float]) -> None:
    assert steady_growth(samples(size)) is None


def test_scatter_is_no_growth() -> None:
    scatter = random.Random(1)
    runs = [samples(lambda second: 900 * MIB + scatter.gauss(0, 50 * MIB)) for _ in range(500)]
    assert sum(steady_growth(run) is not None for run in runs) <= 2


def test_too_few_samples_say_nothing() -> None:
    assert steady_growth(samples(lambda second: second * 100 * MIB, count=20)) is None
