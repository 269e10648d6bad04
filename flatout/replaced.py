"""Temporary changes to torch: functions, attributes and settings that are restored when a context ends.

    replaced            a function; a reference that a script keeps to ours calls the original afterwards
    replaced_in_torch   several of torch's, except while torch.jit.script compiles
    overlaid            an attribute that is not a function, such as a property of a class
    settings_changed    values in a module of settings

Each restores only what it changed itself: what others have set meanwhile stays. Not changed through these:

- what is never restored, in the process of a trial: seeds (`script/seeds.py`), file access and child processes
  (`script/isolation/guard.py`), process exit (`script/trial/isolated_child.py`);
- the patches of the watch, which are removed and reapplied many times in one run (`script/patches.py`);
- the call of one module, for which torch has an attribute (`levers/model_call.py`);
- two functions for the duration of one model call (`levers/channels_last.py`);
- public settings of an object: `loader.pin_memory`, `module.training`, `cudnn.benchmark`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast  # Any: functions of any signature

from flatout.tracebacks import leave_no_frame

F = TypeVar("F", bound=Callable[..., object])


@contextlib.contextmanager
def replaced(owner: object, name: str, make: Callable[[F], Callable[..., object]]) -> Iterator[None]:
    """`owner.name` is `make(original)` until the context ends.

    A wrapper that other code has put around it by then stays, and calls the original; if it was another of these
    contexts, its end removes both.
    """
    inherited = name not in vars(owner)
    original: F = _still_on(getattr(owner, name))
    if inherited and isinstance(owner, type):
        original = cast(F, _inherited(owner, name))
    other, on = make(original), True

    @functools.wraps(original)
    def standing_in(*args: object, **kwargs: object) -> object:
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


def _inherited(owner: type, name: str) -> Callable[..., object]:
    """Calls what `owner` inherits by then. It holds no reference to it: the watch puts its own wrapper there, and takes
    that off again only while nobody holds it."""

    def inherited(*args: object, **kwargs: object) -> object:
        return getattr(super(owner, owner), name)(*args, **kwargs)

    functools.update_wrapper(inherited, getattr(owner, name), updated=())
    delattr(inherited, "__wrapped__")
    return inherited


Replacement = tuple[object, str, Callable[[Any], Callable[..., object]]]
"""Arguments of `replaced`."""


@contextlib.contextmanager
def replaced_in_torch(*replacements: Replacement) -> Iterator[None]:
    """Functions of torch, as by `replaced`; the originals while torch.jit.script compiles, which recognizes them by
    identity."""
    import torch

    def put_in() -> None:
        for owner, name, make in replacements:
            stack.enter_context(replaced(owner, name, make))

    def without(original: Callable[..., object]) -> Callable[..., object]:
        def script(*args: object, **kwargs: object) -> object:
            stack.close()
            try:
                return original(*args, **kwargs)
            finally:
                put_in()

        return script

    with contextlib.ExitStack() as stack, replaced(torch.jit, "script", without):
        put_in()
        yield


@contextlib.contextmanager
def overlaid(owner: object, name: str, value: object) -> Iterator[None]:
    """`owner.name` is `value` until the context ends; something else that was set there meanwhile stays."""
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
    """Each of these attributes of `owner` has the given value until the context ends.

    Contexts may overlap and end in any order: the value is that of the most recent one that is still open. A value that
    others have set meanwhile stays. Raises AttributeError, and changes nothing, if `owner` has no such setting.
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
    """A value of a setting, compared by identity."""

    def __init__(self, value: object) -> None:
        self.value = value


_values: dict[tuple[int, str], list[_Value]] = {}
"""By owner and name while contexts are open: the original value, then the value of each context."""

_MISSING = object()
_ENDED = "_flatout_ended_original"


def _still_on(function: F) -> F:
    """`function`, or the original below it if its context ended while it was wrapped by another function."""
    while _ENDED in getattr(function, "__dict__", {}):
        function = vars(function)[_ENDED]
    return function
