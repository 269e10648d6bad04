"""Everything of torch's that is changed for as long as a context lasts: its functions, its settings.

    replaced            a function; what a script keeps of it calls the original afterwards
    overlaid            an attribute that is none, such as a property of a class
    settings_changed    values of a module of settings

At the end each puts back only what it changed: what somebody else has put there meanwhile stays. Not in here:

- what is changed for the rest of a trial's process: seeds (`script/seeds.py`), where it may write and what it may start
  (`script/isolation/guard.py`), its end (`script/trial/isolated_child.py`);
- the watch over a script, whose patches come and go many times (`script/patches.py`);
- the call of one module, which torch has a place for (`levers/model_call.py`);
- two functions for the length of one call of a model (`levers/channels_last.py`);
- public switches that an object has for its user: `loader.pin_memory`, `module.training`, `cudnn.benchmark`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from flatout.tracebacks import leave_no_frame


@contextlib.contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """`owner.name` is `make(original)` until the context ends.

    What somebody else has put over it by then stays, and calls the original; where that was one of these contexts, it
    takes ours away with its own.
    """
    inherited = name not in vars(owner)
    original = _still_on(getattr(owner, name))
    other, on = make(original), True

    @functools.wraps(original)
    def standing_in(*args: Any, **kwargs: Any) -> Any:
        try:
            return (other if on else original)(*args, **kwargs)
        except BaseException as error:
            leave_no_frame(error)
            raise

    setattr(owner, name, standing_in)
    try:
        yield
    finally:
        on = False
        if getattr(owner, name) is not standing_in:
            vars(standing_in)[_ENDED] = original
        elif inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, _still_on(original))


@contextlib.contextmanager
def overlaid(owner: object, name: str, value: object) -> Iterator[None]:
    """`owner.name` is `value` until the context ends, unless somebody has put something else there by then."""
    own = vars(owner).get(name, _MISSING)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if vars(owner).get(name, _MISSING) is not value:
            pass
        elif own is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


@contextlib.contextmanager
def settings_changed(owner: object, **values: object) -> Iterator[None]:
    """Each of these attributes of `owner` has this value until the context ends; one that was set anew stays so.

    Contexts may overlap and end in any order: the value is that of the newest one that has not ended. Raises
    AttributeError where `owner` has no such setting; nothing is changed then.
    """
    before = {name: getattr(owner, name) for name in values}
    ours = {name: _Value(value) for name, value in values.items()}
    for name, one in ours.items():
        _values.setdefault((id(owner), name), [_Value(before[name])]).append(one)
        setattr(owner, name, one.value)
    try:
        yield
    finally:
        for name, one in ours.items():
            known = _values[id(owner), name]
            is_ours = getattr(owner, name) == known[-1].value
            known.remove(one)
            if is_ours:
                setattr(owner, name, known[-1].value)
            if len(known) == 1:
                del _values[id(owner), name]


class _Value:
    """Of a setting; equal only to itself."""

    def __init__(self, value: object) -> None:
        self.value = value


_values: dict[tuple[int, str], list[_Value]] = {}
"""By owner and name, while such a context lasts: what was there before, then what each context has set."""

_MISSING = object()
_ENDED = "_flatout_ended_original"


def _still_on(function: Any) -> Any:
    """`function`, or what is below it where its context ended while another function stood over it."""
    while _ENDED in getattr(function, "__dict__", {}):
        function = vars(function)[_ENDED]
    return function
