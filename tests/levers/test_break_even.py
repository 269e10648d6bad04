"""When a start-up cost is earned back."""

from __future__ import annotations

from flatout.levers.break_even import Counted, describe, payoff_steps, pays


def test_payoff() -> None:
    assert payoff_steps(61.0, 1.1, 1.0) == 610 or payoff_steps(61.0, 1.1, 1.0) == 611
    assert payoff_steps(4.0, 0.5, 0.25) == 16
    assert payoff_steps(0.1, 1.0, 0.5) is None  # nothing to speak of
    assert payoff_steps(60.0, 1.0, 1.0) is None  # nothing saved
    assert payoff_steps(60.0, 1.0, 2.0) is None


def test_pays() -> None:
    assert pays(None, 10)
    assert pays(10, None)
    assert pays(10, 11)
    assert not pays(10, 10)


def test_the_sentence() -> None:
    assert describe(4.0, None, 100) == ""
    assert "pays off after 1,600 steps" in describe(4.0, 1600, 2000)
    assert describe(4.0, 1, 2000).endswith("pays off after 1 step")
    assert describe(4.0, 1600, 1000).endswith("but the script runs 1,000")
    assert "--steps" in describe(4.0, 1600, None)


def test_the_sentence_counts_what_it_is_told_to() -> None:
    items = Counted(unit="items", unknown="give items=", known="there are")
    assert describe(40.0, 20000, 1000, items) == "40 s to start, pays off after 20,000 items, but there are 1,000"
    assert describe(40.0, 20000, None, items).endswith("20,000 items (give items=)")
