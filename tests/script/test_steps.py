"""What a sequence of calls means as training steps."""

from __future__ import annotations

import pytest

from flatout.script.steps import (
    ACCUMULATION_LIMIT,
    GRADIENT_CONFIRMATIONS,
    MANUAL_CONFIRMATIONS,
    PATIENCE_TURNS,
    StepFinder,
)


def feed(finder: StepFinder, calls: str) -> list[bool]:
    """'b' is a backward pass, 'f' one into fresh weights, 'w' a change of weights; any other letter an optimizer."""
    answers = []
    for call in calls:
        if call == "w":
            finder.weights_changed()
        elif call in "bf":
            answers.append(finder.backward_ended(fresh=call == "f"))
        else:
            answers.append(finder.optimizer_stepped(ord(call)))
    return answers


@pytest.mark.parametrize(
    ("calls", "steps"),
    [
        ("bA" * 50, 50),
        ("bbbbA" * 20, 20),
        (("b" * 40 + "A") * 20, 20),
        ("bDbG" * 30, 30),
        ("bABC" * 30, 30),
        (("bD" * 5 + "bG") * 20, 20),
        (("bD" * 100 + "bG") * 3, 3),
        ("bA" * 50 + "bB" * 50, 100),
        ("bA" * 50 + "bBC" * 50, 100),
        ("bA" * 3 + "bB" * 300 + "bA" * 300, 603),
        ("bA", 1),
        ("bwbwbw" + "bA" * 10, 13),
        ("", 0),
        ("b" * GRADIENT_CONFIRMATIONS, 0),
    ],
    ids=lambda value: f"{value[:8]}" if isinstance(value, str) else str(value),
)
def test_steps_are_counted_in_hindsight(calls: str, steps: int) -> None:
    finder = StepFinder()
    feed(finder, calls)
    assert finder.steps == steps


@pytest.mark.parametrize(
    ("calls", "replaced"),
    [("bABC" * 30, 2), ("bDbG" * 30, 1), ("bA" * 50 + "bB" * 50, 1), ("bA" * 30, 0), ("bwbwbw" + "bA" * 10, 0)],
)
def test_leaders_that_are_replaced_while_they_are_there(calls: str, replaced: int) -> None:
    finder = StepFinder()
    feed(finder, calls)
    assert finder.replaced_leaders == replaced


def test_an_optimizer_that_succeeds_one_that_is_gone_replaces_no_leader() -> None:
    finder = StepFinder()
    for optimizer in "ABC":
        feed(finder, f"b{optimizer}")
        finder.forget(ord(optimizer))
    assert (finder.replaced_leaders, finder.steps) == (0, 3)


def test_a_leader_is_new_until_it_has_stepped_twice() -> None:
    finder = StepFinder()
    assert not finder.leader_is_new
    feed(finder, "bD")
    assert (finder.leader_is_new, finder.optimizers) == (True, 1)
    feed(finder, "bG")
    assert (finder.leader_is_new, finder.optimizers) == (True, 2)
    feed(finder, "bDbG")
    assert not finder.leader_is_new


def test_the_last_of_several_optimizers_ends_the_step() -> None:
    finder = StepFinder()
    feed(finder, "DG")
    assert feed(finder, "DGDG") == [False, True, False, True]
    assert finder.kind == "optimizer"


def test_a_leader_that_left_is_replaced() -> None:
    finder = StepFinder()
    feed(finder, "AABB")  # B leads
    assert feed(finder, "A" * PATIENCE_TURNS) == [False] * PATIENCE_TURNS
    assert feed(finder, "AAA") == [True] * 3
    assert finder.steps == 4 + PATIENCE_TURNS + 3


def test_manual_updates() -> None:
    finder = StepFinder()
    assert finder.needs_weight_changes
    assert feed(finder, "b" + "wb" * (MANUAL_CONFIRMATIONS - 1)) == [False] * MANUAL_CONFIRMATIONS
    assert feed(finder, "wb") == [True]
    assert (finder.kind, finder.steps) == ("manual", MANUAL_CONFIRMATIONS + 1)
    assert not finder.needs_weight_changes
    assert feed(finder, "bb") == [True, True]


def test_functional_updates() -> None:
    finder = StepFinder()
    assert feed(finder, "f" * GRADIENT_CONFIRMATIONS) == [False] * (GRADIENT_CONFIRMATIONS - 1) + [True]
    assert (finder.kind, finder.steps) == ("gradient", GRADIENT_CONFIRMATIONS)


def test_long_accumulation_is_no_step_but_hundreds_of_passes_are() -> None:
    finder = StepFinder()
    assert not any(feed(finder, "b" * (ACCUMULATION_LIMIT - 1)))
    assert feed(finder, "b") == [True]
    assert finder.kind == "gradient"
    feed(finder, "bAbA")
    assert (finder.kind, finder.steps) == ("optimizer", 2)


def test_an_optimizer_that_is_gone_does_not_lend_its_identity() -> None:
    finder = StepFinder()
    feed(finder, "AAABBB")
    finder.forget(ord("A"))
    assert feed(finder, "AAA") == [True, True, True]  # another one
    assert finder.steps == 9
    finder.forget(ord("A"))
    assert feed(finder, "BB") == [True, True]  # nothing else is there to lead
    assert (finder.steps, finder.optimizers) == (11, 1)


def test_steps_that_passed_unreported_are_the_leaders() -> None:
    finder = StepFinder()
    feed(finder, "A")
    finder.leader_passed(300)
    assert (finder.steps, finder.leader_is_new) == (301, False)
    feed(finder, "BA")  # A does not take turns with B: it has long trained alone
    assert finder.steps == 302
