"""A function that is replaced for a while is back in the end, in whatever order the contexts end."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from types import SimpleNamespace

import pytest

from flatout.replaced import overlaid, replaced, settings_changed


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


def test_what_a_class_inherits_is_not_held() -> None:
    class Base:
        def call(self) -> str:
            return "o"

    class Derived(Base):
        pass

    with replaced(Derived, "call", lambda before: lambda self: "1" + before(self)):
        original, theirs = weakref.ref(Base.call), Derived.call
        assert Derived().call() == "1o"
        Base.call = lambda self: "b"  # type: ignore[method-assign]
        assert Derived().call() == "1b"
        assert original() is None
    assert "call" not in vars(Derived)
    assert theirs(Derived()) == Derived().call() == "b"


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_setting_is_that_of_the_newest_context_left(order: tuple[int, ...]) -> None:
    settings = SimpleNamespace(limit=8, other=True)
    stacks = [contextlib.ExitStack() for _ in range(3)]
    values = [64, 64, 128]
    for stack, value in zip(stacks, values, strict=True):
        stack.enter_context(settings_changed(settings, limit=value, other=False))
    on = {0, 1, 2}
    for number in order:
        stacks[number].close()
        on.remove(number)
        assert settings.limit == (values[max(on)] if on else 8)
        assert settings.other is not bool(on)


def test_a_setting_that_a_script_sets_meanwhile_stays() -> None:
    settings = SimpleNamespace(limit=8)
    with settings_changed(settings, limit=64), settings_changed(settings, limit=128):
        settings.limit = 16
    assert settings.limit == 16
    with settings_changed(settings, limit=64):
        assert settings.limit == 64
    assert settings.limit == 16


def test_a_setting_that_is_not_there_is_not_made() -> None:
    settings = SimpleNamespace(limit=8)
    with pytest.raises(AttributeError, match="gone"), settings_changed(settings, limit=64, gone=1):
        pass
    assert vars(settings) == {"limit": 8}


def test_what_is_laid_over_an_attribute_of_a_base_is_taken_away() -> None:
    class Base:
        value = "theirs"

    class Kind(Base):
        pass

    with overlaid(Kind, "value", property(lambda _: "ours")):
        assert Kind().value == "ours"
    assert Kind().value == "theirs"
    assert "value" not in vars(Kind)
    with overlaid(Base, "value", "ours"):
        assert Kind().value == "ours"
    assert Kind().value == "theirs"
    with overlaid(Kind, "value", "ours"):
        Kind.value = "a script's"
    assert Kind().value == "a script's"
