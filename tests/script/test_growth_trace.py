"""Which line makes something grow, seen while this very file runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import pytest

from flatout.script.growth_trace import GrowthTrace


@pytest.fixture(autouse=True)
def _no_other_tracer() -> Iterator[None]:
    before = sys.gettrace()
    sys.settrace(None)
    yield
    sys.settrace(before)


def is_ours(file: str) -> bool:
    return file == __file__


def line_of(function: Callable[..., object]) -> int:
    """The line in a function of this file that is marked."""
    import inspect

    lines, first = inspect.getsourcelines(function)
    return next(first + number for number, text in enumerate(lines) if "# here" in text)


def noisy(value: int) -> int:
    doubled = value * 2
    return doubled


def two_appends(kept: list[int], other: list[int]) -> None:
    for number in range(3):
        other.append(number)
        kept.append(noisy(number))  # here
        other.append(noisy(number))


def through_another_name(kept: list[int]) -> None:
    alias = kept
    for number in range(3):
        add(alias, noisy(number))


def add(target: list[int], value: int) -> None:
    target.append(value)  # here


def test_the_line_is_the_one_that_appends_though_it_calls_others() -> None:
    kept: list[int] = []
    other: list[int] = []
    trace = GrowthTrace([lambda: len(kept), lambda: 0], is_ours)
    trace.start(sys._getframe())
    two_appends(kept, other)
    trace.stop()
    assert trace.line_of(0) == (__file__, line_of(two_appends))
    assert trace.line_of(1) is None


def test_another_name_for_the_list_hides_nothing() -> None:
    kept: list[int] = []
    trace = GrowthTrace([lambda: len(kept)], is_ours)
    trace.start(sys._getframe())
    through_another_name(kept)
    trace.stop()
    assert trace.line_of(0) == (__file__, line_of(add))


def test_a_script_that_is_traced_keeps_its_tracer() -> None:
    def theirs(*_: object) -> None:
        return None

    sys.settrace(theirs)
    trace = GrowthTrace([lambda: 0], is_ours)
    trace.start(sys._getframe())
    trace.stop()
    assert sys.gettrace() is theirs
