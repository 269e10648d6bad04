"""Gradients that were freed after their update while the script takes them to be there still.

Until the script frees them itself, nothing may be made of their absence: who reads one gets an error. Imported when the
lever is on, after the script has imported torch.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from flatout.errors import ScriptError
from flatout.replaced import overlaid

_SLOT: Any = torch.Tensor.grad
"""torch's own attribute."""
_get, _put, _drop = _SLOT.__get__, _SLOT.__set__, _SLOT.__delete__
CARRIERS = ("torch.optim.", "torch.nn.modules.", "flatout.")
"""Modules that pass on a gradient where there is one, or take the update from it, which was made."""
REMEDY = "run it without optimizer_in_backward"


class ConsumedGradients:
    """Of which parameters; and of which the script was seen to free the gradients since. `when_done` is called once
    nothing is left to guard after `close`."""

    def __init__(self, when_done: Callable[[], None]) -> None:
        self._when_done = when_done
        self._closing = False
        self._gone: dict[int, weakref.ref[Any]] = {}
        self._freed: dict[int, weakref.ref[Any]] = {}

    def add(self, parameter: Any) -> None:
        """Its gradient was used, and is gone."""
        key = id(parameter)
        self._gone[key] = weakref.ref(parameter, lambda _: self._forget(key))
        self._freed.pop(id(parameter), None)

    def __contains__(self, parameter: Any) -> bool:
        return _holds(self._gone, parameter)

    def was_freed(self, parameter: Any) -> bool:
        """Did the script free its gradients since it was last updated here?"""
        return _holds(self._freed, parameter)

    def parameters(self) -> list[Any]:
        return [one for reference in list(self._gone.values()) if (one := reference()) is not None]

    def close(self) -> None:
        """Nothing will be added any more."""
        self._closing = True
        self._end_if_done()

    # what the script calls

    def of_optimizer(self, original: Any) -> Any:
        def zero_grad(optimizer: Any, set_to_none: bool = True) -> None:
            self._free((one for group in optimizer.param_groups for one in group["params"]), bool(set_to_none))
            original(optimizer, set_to_none)

        return zero_grad

    def of_module(self, original: Any) -> Any:
        def zero_grad(module: Any, set_to_none: bool = True) -> None:
            self._free(module.parameters(), bool(set_to_none))
            original(module, set_to_none)

        return zero_grad

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """`.grad` of these parameters is no None that anybody could take for the truth."""
        gone = self._gone

        def read(parameter: Any) -> Any:
            if id(parameter) in gone and parameter in self and not _carries(sys._getframe(1).f_globals):
                raise ScriptError(
                    "the script reads a gradient",
                    limit="it was freed when its parameter was updated, within the backward pass",
                    remedy=REMEDY,
                )
            return _get(parameter)

        def write(parameter: Any, gradient: Any) -> None:
            _put(parameter, gradient)
            self._forget(id(parameter))

        def delete(parameter: Any) -> None:
            _drop(parameter)
            self._forget(id(parameter))

        ours = property(read, write, delete)
        with overlaid(torch.nn.Parameter, "grad", ours):
            yield

    # what becomes of them

    def _free(self, parameters: Iterable[Any], to_none: bool) -> None:
        for parameter in parameters:
            if parameter in self:
                self._forget(id(parameter))
                if not to_none:
                    _put(parameter, torch.zeros_like(parameter, requires_grad=False))
            if to_none:
                self._freed[id(parameter)] = weakref.ref(parameter)
            else:
                self._freed.pop(id(parameter), None)

    def _forget(self, key: int) -> None:
        if self._gone.pop(key, None) is not None:
            self._end_if_done()

    def _end_if_done(self) -> None:
        if self._closing and not self.parameters():
            self._when_done()


def _holds(references: dict[int, weakref.ref[Any]], parameter: Any) -> bool:
    reference = references.get(id(parameter))
    return reference is not None and reference() is parameter


def _carries(reader: dict[str, Any]) -> bool:
    return str(reader.get("__name__")).startswith(CARRIERS)
