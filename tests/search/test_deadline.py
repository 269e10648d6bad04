"""A budget: what is left of it, what is kept back, and what is blamed for an overrun. No real time passes here."""

from __future__ import annotations

from flatout.search.deadline import Deadline


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_what_is_left_shrinks_and_never_falls_below_zero() -> None:
    clock = Clock()
    deadline = Deadline(30.0, clock=clock)
    assert deadline.seconds_left == 30.0
    clock.now += 20
    assert deadline.seconds_left == 10.0
    clock.now += 25
    assert deadline.seconds_left == 0.0
    assert deadline.exceeded_seconds == 15.0


def test_time_kept_back_belongs_to_what_comes_later() -> None:
    clock = Clock()
    whole = Deadline(30.0, clock=clock)
    search = whole.reserving(12.0)
    assert search.seconds_left == 18.0
    assert search.reserving(3.0).seconds_left == 15.0
    clock.now += 20
    assert search.seconds_left == 0
    assert whole.seconds_left == 10.0
    assert search.exceeded_seconds == 0.0
    assert search.budget_seconds == 30.0


def test_an_overrun_names_the_innermost_stage() -> None:
    clock = Clock()
    whole = Deadline(30.0, clock=clock)
    search = whole.reserving(12.0)
    with whole.stage("the proof"):
        clock.now += 29
        with search.stage("starting the script"):
            clock.now += 10
        clock.now += 3
    assert whole.explanation == (
        "the budget of 30 s was exceeded by 12 s: starting the script took 9 s of that, the proof took 3 s of that"
    )


def test_a_small_overrun_is_not_worth_a_word() -> None:
    clock = Clock()
    deadline = Deadline(30.0, clock=clock)
    clock.now += 33
    assert deadline.explanation == ""
    clock.now += 0.1
    assert "exceeded by 3.1 s: other work took 3.1 s of that" in deadline.explanation
