"""Levers go on and come off in order, with nothing left behind, whatever one of them does."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pytest

from flatout.levers.applied import Applied
from flatout.levers.lever import Choice, Lever
from flatout.levers.subject import Handles, Subject


class Thing:
    """A handle: something that can be held weakly, and compares by value."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self) -> None:
        self.marks: list[str] = []

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Thing)


class Marks(Lever):
    """Marks each module; `value` 'raises' fails at once, 'half' after the first module."""

    exactness = "bit-identical"

    def __init__(self, name: str) -> None:
        self.name = self.plan_field = name  # type: ignore[misc]

    @contextlib.contextmanager
    def apply(self, subject: Subject, value: Any) -> Iterator[None]:
        def visit(module: Any) -> Any:
            if value == "raises":
                raise ValueError("first line\nsecond line")
            module.marks.append(self.name)
            return lambda module: module.marks.remove(self.name)

        with subject.modules.each(visit):
            if value == "half":
                raise RuntimeError
            yield

    def label(self, value: Any) -> str:
        return self.name


@pytest.fixture
def subject() -> Subject:
    return Subject()


def test_exactly_the_chosen_are_on(subject: Subject) -> None:
    first, later = Thing(), Thing()
    subject.modules.add(first)
    applied = Applied(subject)
    a, b, c = (Choice(Marks(name), True) for name in "abc")
    applied.set([a, b])
    subject.modules.add(later)
    assert (first.marks, later.marks) == (["a", "b"], ["a", "b"])
    applied.set([b, c])
    assert (first.marks, later.marks) == (["b", "c"], ["b", "c"])
    assert applied.choices == [b, c]
    applied.set([])
    assert (first.marks, later.marks) == ([], [])


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("raises", "could not be applied: ValueError: first line"),
        ("half", "could not be applied: RuntimeError"),
    ],
)
def test_a_lever_that_cannot_be_applied_stays_off(subject: Subject, value: str, reason: str) -> None:
    module = Thing()
    subject.modules.add(module)
    applied = Applied(subject)
    bad, good = Choice(Marks("bad"), value), Choice(Marks("good"), True)
    applied.set([bad, good])
    assert applied.choices == [good]
    assert [(entry.choice, entry.reason) for entry in applied.rolled_back] == [(bad, reason)]
    applied.set([])
    applied.set([bad, good])
    assert len(applied.rolled_back) == 1  # it is not tried again
    assert module.marks == ["good"]
    late = Thing()
    subject.modules.add(late)
    assert late.marks == ["good"]


def test_handles_hold_nothing_alive() -> None:
    handles: Handles[Thing] = Handles()
    one, two = Thing(), Thing()
    for thing in (one, two, one):
        handles.add(thing)
    assert len(handles) == 2
    assert one in handles
    assert Thing() not in handles
    undone: list[int] = []
    with handles.each(lambda thing: lambda thing: undone.append(id(thing))):
        kept = id(one)
        del two, thing
        gc.collect()
        assert len(handles) == 1
    assert undone == [kept]
    assert [thing is one for thing in handles] == [True]


def test_a_visit_that_fails_undoes_those_before() -> None:
    handles: Handles[Thing] = Handles()
    things = [Thing(), Thing()]
    for thing in things:
        handles.add(thing)

    def visit(thing: Thing) -> Any:
        if thing is things[1]:
            raise ValueError("the second")
        thing.marks.append("visited")
        return lambda thing: thing.marks.clear()

    with pytest.raises(ValueError, match="the second"), handles.each(visit):
        raise AssertionError("not reached")
    assert [thing.marks for thing in things] == [[], []]
    handles.add(extra := Thing())
    assert extra.marks == []


def test_wrappers_nest_and_leave(subject: Subject) -> None:
    order: list[str] = []

    def wrap(name: str) -> Any:
        def wrapper(module: Any, call: Any) -> Any:
            order.append(name)
            return [*call(), name]

        return wrapper

    inner, outer = wrap("inner"), wrap("outer")
    with subject.around_calls(inner), subject.around_calls(outer):
        assert subject.call(None, list) == ["inner", "outer"]
    assert subject.call(None, list) == []
    with subject.around_backward(inner):
        assert subject.backward_wrappers == [inner]
    hook = order.append
    with pytest.raises(ValueError, match="stop"), subject.before_iterators(hook):
        raise ValueError("stop")
    assert (subject.wrappers, subject.backward_wrappers, subject.iterator_hooks) == ([], [], [])


class Wraps(Marks):
    """Puts its name around what it finds, and puts back what it found, as levers do that replace a module's call."""

    @contextlib.contextmanager
    def apply(self, subject: Subject, value: Any) -> Iterator[None]:
        def visit(module: Any) -> Any:
            found = list(module.marks)
            module.marks[:] = [*found, self.name]

            def undo(module: Any) -> None:
                module.marks[:] = found

            return undo

        with subject.modules.each(visit):
            yield

    def wraps_blocks(self, value: Any) -> bool:
        return True


def test_what_wraps_the_same_calls_is_applied_in_order_again(subject: Subject) -> None:
    module = Thing()
    subject.modules.add(module)
    applied = Applied(subject)
    inner, outer = Choice(Wraps("inner"), True), Choice(Wraps("outer"), True)
    applied.set([outer])
    applied.set([inner, outer])
    assert module.marks == ["inner", "outer"]
    applied.set([outer])
    assert module.marks == ["outer"]
    applied.set([])
    assert module.marks == []
