"""One of torch's functions replaced for as long as a context lasts."""

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


_ENDED = "_flatout_ended_original"


def _still_on(function: Any) -> Any:
    """`function`, or what is below it where its context ended while another function stood over it."""
    while _ENDED in getattr(function, "__dict__", {}):
        function = vars(function)[_ENDED]
    return function
