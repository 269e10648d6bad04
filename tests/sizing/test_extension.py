"""Timelines of small steps, extended to a large one."""

from __future__ import annotations

import math

import pytest

from flatout.memory.timeline import Allocation, Timeline
from flatout.sizing.real_steps import Sizes, extended

TAKEN = (4, 8, 12)


def timeline(*shapes: tuple[int, ...]) -> Timeline:
    """Four bytes an element, all alive at the end."""
    ones = [
        Allocation(size_bytes=4 * math.prod(shape), born=i, phase="forward", step=0, operation=f"op{i}", shape=shape)
        for i, shape in enumerate(shapes)
    ]
    return Timeline(ones, [(i, True) for i in range(len(ones))])


def far(*shapes: tuple[int, ...], wanted: int = 120, parts: int = 1) -> tuple[Timeline, Timeline]:
    """One tensor, of that shape in each step."""
    found = extended([timeline(shape) for shape in shapes], Sizes(taken=TAKEN, wanted=wanted, parts=parts))
    assert found is not None
    return found


def elements(found: tuple[Timeline, Timeline]) -> tuple[int, int]:
    expected, high = (timeline.allocations[0].size_bytes // 4 for timeline in found)
    return expected, high


@pytest.mark.parametrize(
    ("shapes", "wanted"),
    [
        ([(7, 3)] * 3, 21),
        ([(4, 3), (8, 3), (12, 3)], 360),
        ([(4, 4), (8, 8), (12, 12)], 14_400),
        ([(5,), (9,), (13,)], 121),
        ([(20,), (40,), (60,)], 600),
    ],
)
def test_what_goes_with_the_batch_is_exact(shapes: list[tuple[int, ...]], wanted: int) -> None:
    assert elements(far(*shapes)) == (wanted, wanted)


def test_parts_of_a_batch_are_exact_too() -> None:
    assert elements(far((2,), (4,), (6,), parts=2)) == (60, 60)
    assert elements(far((2,), (4,), (6,)))[1] > 60  # without parts it may be a choice of the data


def test_a_share_of_few_samples_may_be_far_off() -> None:
    expected, high = elements(far((1,), (2,), (4,)))
    assert expected == 40
    assert high == 80  # 2 deviations of 4 events are as many again
    assert elements(far((4,), (7,), (10,))) == (100, 120)  # no more than there are samples
    assert elements(far((1,), (1,), (0,))) == (0, 30)


def test_the_peak_is_found_anew() -> None:
    ones = [timeline((100,), (size,)) for size in TAKEN]
    found = extended(ones, Sizes(taken=TAKEN, wanted=400))
    assert found is not None
    assert found[0].peak().size_bytes == 4 * 500


def test_other_courses_are_not_extended() -> None:
    sizes = Sizes(taken=(1, 2), wanted=8)
    changed = timeline((2,))
    changed.allocations[0].operation = "another"
    assert extended([timeline((1,)), changed], sizes) is None
    assert extended([timeline((1,)), timeline((1, 2))], sizes) is None
    assert extended([timeline((1,)), Timeline([], [])], sizes) is None
