"""Every lever, in the order in which they are applied."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable
from typing import get_args

from flatout.levers.lever import Choice, Lever, Switch
from flatout.plan_choices import Scope, declared

SWITCHES = get_args(Switch)


@functools.cache
def levers_of(scope: Scope) -> tuple[Lever, ...]:
    """The levers of a scope, in the order of `flatout.plan_choices`, except that those with `comes_first` are first and
    those that need a new loader or process come after live ones."""
    paths = [path.split(":") for one in declared().values() if scope in one.scopes for path in one.levers]
    found = [getattr(importlib.import_module(f"flatout.levers.{module}"), name)() for module, name in paths]
    return tuple(sorted(found, key=_turn))


def in_order(choices: Iterable[Choice]) -> list[Choice]:
    """In the order in which a plan applies them."""
    places = {name: place for place, name in enumerate(declared())}
    return sorted(choices, key=lambda one: (*_turn(one.lever), places[one.field]))


def _turn(lever: Lever) -> tuple[bool, int]:
    return not lever.comes_first, SWITCHES.index(lever.switch)


LEVERS = levers_of("script")
"""The levers of unmodified scripts, and so of `flatout tune`."""

INTERACTING: tuple[tuple[str, str], ...] = tuple(
    (other, name) for name, one in declared().items() for other in one.pairs_with
)
"""Pairs of choices that may help together even if one of them did not help alone."""
