"""Gradients that were freed after their update, while the script assumes that they still exist.

Until the script frees them itself, reading one raises an error: code that saw None could act on it. Imported when the
lever is on, after the script has imported torch.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from flatout.errors import ScriptError
from flatout.levers.grad_attribute import delete_grad, get_grad, grad_replaced, set_grad
from flatout.parameters import parameters_of

CARRIERS = ("torch.optim.", "torch.nn.modules.", "flatout.")
"""Modules that only pass gradients on, or apply the update, which has been made already."""
REMEDY = "run it without optimizer_in_backward"


class ConsumedGradients:
    """The parameters whose gradients were consumed, and those whose gradients the script has freed since. `when_done`
    is called after `close`, as soon as nothing is left to guard."""

    def __init__(self, when_done: Callable[[], None]) -> None:
        self._when_done = when_done
        self._closing = False
        self._gone: dict[int, weakref.ref[Tensor]] = {}
        self._freed: dict[int, weakref.ref[Tensor]] = {}

    def add(self, parameter: Tensor) -> None:
        """Its gradient was used and freed."""
        key = id(parameter)
        self._gone[key] = weakref.ref(parameter, lambda _: self._forget(key))
        self._freed.pop(id(parameter), None)

    def __contains__(self, parameter: Tensor) -> bool:
        return _holds(self._gone, parameter)

    def was_freed(self, parameter: Tensor) -> bool:
        """Has the script freed its gradient since it was last updated here?"""
        return _holds(self._freed, parameter)

    def parameters(self) -> list[Tensor]:
        return [one for reference in list(self._gone.values()) if (one := reference()) is not None]

    def close(self) -> None:
        """Nothing will be added any more."""
        self._closing = True
        self._end_if_done()

    # what the script calls

    def of_optimizer(self, original: Callable[[Optimizer, bool], None]) -> Callable[[Optimizer, bool], None]:
        def zero_grad(optimizer: Optimizer, set_to_none: bool = True) -> None:
            self._free(parameters_of(optimizer), bool(set_to_none))
            original(optimizer, set_to_none)

        return zero_grad

    def of_module(self, original: Callable[[Module, bool], None]) -> Callable[[Module, bool], None]:
        def zero_grad(module: Module, set_to_none: bool = True) -> None:
            self._free(module.parameters(), bool(set_to_none))
            original(module, set_to_none)

        return zero_grad

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Reading `.grad` of these parameters raises ScriptError, until the script frees or sets it."""
        gone = self._gone

        def read(parameter: Tensor) -> Tensor | None:
            if id(parameter) in gone and parameter in self and not _carries(sys._getframe(1).f_globals):
                raise ScriptError(
                    "a gradient is read",
                    limit="it was freed when its parameter was updated, within the backward pass",
                    remedy=REMEDY,
                )
            return get_grad(parameter)

        def write(parameter: Tensor, gradient: Tensor | None) -> None:
            set_grad(parameter, gradient)
            self._forget(id(parameter))

        def delete(parameter: Tensor) -> None:
            delete_grad(parameter)
            self._forget(id(parameter))

        with grad_replaced(read, write, delete):
            yield

    def _free(self, parameters: Iterable[Tensor], to_none: bool) -> None:
        for parameter in parameters:
            if parameter in self:
                self._forget(id(parameter))
                if not to_none:
                    set_grad(parameter, torch.zeros_like(parameter, requires_grad=False))
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


def _holds(references: dict[int, weakref.ref[Tensor]], parameter: Tensor) -> bool:
    reference = references.get(id(parameter))
    return reference is not None and reference() is parameter


def _carries(reader: dict[str, object]) -> bool:
    return str(reader.get("__name__")).startswith(CARRIERS)
