"""Backward passes that update parameters, for a script: which may, what is checked meanwhile, what happens afterwards.

Until the script frees a gradient itself, reading one that was freed after its update raises an error: code that saw
None could act on it. Imported when the lever is on, after the script has imported torch.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from flatout.errors import ScriptError
from flatout.levers.call_site import FoundSite, after_backward
from flatout.levers.grad_attribute import delete_grad, get_grad, grad_replaced, held_by, set_grad
from flatout.levers.in_backward import UpdatesInBackward, hook_obstacle, optimizer_obstacle
from flatout.levers.subject import Roots, Subject
from flatout.parameters import parameters_of
from flatout.signals import held_back

T = TypeVar("T")
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

    def zero_grad(self, original: Callable[[T, bool], None]) -> Callable[[T, bool], None]:
        """Of optimizers and of modules."""

        def zero_grad(owner: T, set_to_none: bool = True) -> None:
            self._free(held_by(owner), bool(set_to_none))
            original(owner, set_to_none)

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


class UpdatingPasses:
    """`report` is called with the reason why a pass did not update."""

    def __init__(self, subject: Subject, consumed: ConsumedGradients, report: Callable[[str], None]) -> None:
        self._subject, self._consumed, self._report = subject, consumed, report

    def around(self, roots: Roots, run: Callable[[Roots], object]) -> object:
        """Wraps each backward pass of the script."""
        site = after_backward(sys._getframe(1))
        obstacle = self._obstacle(site)
        with contextlib.ExitStack() as stack:
            for parameter in self._consumed.parameters():
                stack.callback(parameter.register_post_accumulate_grad_hook(_already_updated).remove)
            if obstacle:
                self._report(obstacle)
                return run(roots)
            stack.enter_context(held_back())
            for ahead, optimizer in enumerate(site.optimizers):
                stack.callback(_GuardedUpdates(optimizer, ahead, self._subject, self._consumed).close)
            return run(roots)

    def _obstacle(self, site: FoundSite) -> str:
        if site.obstacle:
            return site.obstacle
        found = pass_obstacle(site.optimizers, self._subject)
        if found:
            return found
        freed_next = {id(one) for owner in site.zeroed for one in held_by(owner)}
        for parameter in (one for optimizer in site.optimizers for one in held_by(optimizer) if one.requires_grad):
            if parameter in self._consumed:  # a hook raises if this pass reaches it
                continue
            if parameter.grad is not None:
                return "gradients of an earlier backward pass were not freed"
            if id(parameter) not in freed_next and not self._consumed.was_freed(parameter):
                return "zero_grad did not free the gradients before the backward pass"
        return ""


class _GuardedUpdates(UpdatesInBackward):
    """The updates of one pass, announced to `subject.before_update`."""

    def __init__(self, optimizer: Optimizer, ahead: int, subject: Subject, consumed: ConsumedGradients) -> None:
        self._ahead, self._subject, self._consumed = ahead, subject, consumed
        self._all = parameters_of(optimizer)
        super().__init__(optimizer)

    def update(self, parameter: Tensor) -> None:
        if parameter in self._consumed:
            _already_updated(parameter)
        for listener in self._subject.before_update:
            listener(self._all, parameter, self._ahead)
        self._subject.updating = True
        try:
            super().update(parameter)
        finally:
            self._subject.updating = False
        self._consumed.add(parameter)


def _already_updated(parameter: Tensor) -> None:
    raise ScriptError(
        "a parameter that was updated got another gradient before zero_grad",
        limit="its first gradient was used and freed within the backward pass",
        remedy=REMEDY,
    )


def pass_obstacle(optimizers: Sequence[Optimizer], subject: Subject) -> str:
    """Why a backward pass cannot update the parameters of these optimizers; '' if it can."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return "gradients are averaged over ranks only after they were computed"
    for optimizer in optimizers:
        found = optimizer_obstacle(optimizer)
        if found:
            return found
    others = [one for one in subject.optimizers if all(one is not mine for mine in optimizers)]
    theirs = {id(parameter) for optimizer in others for parameter in held_by(optimizer)}
    held = [id(parameter) for optimizer in optimizers for parameter in held_by(optimizer)]
    if theirs.intersection(held) or len(set(held)) < len(held):
        return "two optimizers share parameters"
    return hook_obstacle(subject.modules)
