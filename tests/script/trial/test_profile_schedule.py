"""How the steps of a short script are divided among the windows of a profile."""

from __future__ import annotations

import pytest

from flatout.script.profile_trial import Schedule, fitting, full


def total(schedule: Schedule) -> int:
    return schedule.warm_up + schedule.timed + schedule.follow + schedule.settle + schedule.steps


@pytest.mark.parametrize("asked", [1, 5, 40])
@pytest.mark.parametrize("seen", range(2, 40))
def test_it_fits_whatever_the_script_has(seen: int, asked: int) -> None:
    schedule = fitting(seen, asked)
    assert schedule is not None
    assert total(schedule) <= seen
    assert 1 <= schedule.steps <= asked
    assert schedule.warm_up >= 1  # up to the first recognized step nothing can begin
    assert schedule.follow == (seen >= 4)
    assert schedule.timed >= (seen > 2)


def test_a_single_step_is_too_few() -> None:
    assert fitting(1, 5) is None
    assert fitting(0, 5) is None


def test_of_a_long_script_more_than_enough_is_timed() -> None:
    assert full(5) == Schedule(warm_up=3, timed=5, timed_seconds=0.5, follow=True, settle=1, steps=5)
    assert (full(20).timed, full(2000).timed) == (20, 50)
