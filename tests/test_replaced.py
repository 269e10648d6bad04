"""A function that is replaced for a while is back in the end, in whatever order the contexts end."""

from __future__ import annotations

import contextlib
import itertools
from types import SimpleNamespace

import pytest

from flatout.replaced import replaced


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_original_is_back(order: tuple[int, ...]) -> None:
    def original() -> str:
        return "o"

    owner = SimpleNamespace(call=original)
    stacks = [contextlib.ExitStack() for _ in range(3)]
    for number, stack in enumerate(stacks):
        stack.enter_context(replaced(owner, "call", lambda before, number=number: lambda: f"{number}{before()}"))
    assert owner.call() == "210o"
    on = {0, 1, 2}
    for number in order:
        stacks[number].close()
        on.remove(number)
        assert owner.call() == "".join(str(one) for one in sorted(on, reverse=True)) + "o"
    assert owner.call is original


def test_what_somebody_else_put_over_it_stays() -> None:
    owner = SimpleNamespace(call=lambda: "o")
    with replaced(owner, "call", lambda before: lambda: "1" + before()):
        below = owner.call
        owner.call = theirs = lambda: "t" + below()
        assert owner.call() == "t1o"
    assert owner.call is theirs
    assert owner.call() == "to"
