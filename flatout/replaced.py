"""One of torch's functions replaced for as long as a context lasts."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TypeVar

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


_ENDED = "_flatout_ended_original"


def _still_on(function: F) -> F:
    """`function`, or the original below it if its context ended while it was wrapped by another function."""
    while _ENDED in getattr(function, "__dict__", {}):
        function = vars(function)[_ENDED]
    return function
