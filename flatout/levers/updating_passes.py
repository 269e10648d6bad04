"""Backward passes that update parameters, for a script: which of them may, and what is checked while one does.

Imported when the lever is on, after the script has imported torch.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from flatout.errors import ScriptError
from flatout.levers.call_site import FoundSite, after_backward
from flatout.levers.consumed_gradients import REMEDY, ConsumedGradients
from flatout.levers.in_backward import UpdatesInBackward, hook_obstacle, optimizer_obstacle
from flatout.levers.subject import Roots, Subject
from flatout.parameters import parameters_of
from flatout.signals import held_back


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
        freed_next = {id(one) for owner in site.zeroed for one in _parameters_of(owner)}
        for parameter in _trained(site.optimizers):
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
    theirs = {id(parameter) for optimizer in others for parameter in _parameters_of(optimizer)}
    held = [id(parameter) for optimizer in optimizers for parameter in _parameters_of(optimizer)]
    if theirs.intersection(held) or len(set(held)) < len(held):
        return "two optimizers share parameters"
    return hook_obstacle(subject.modules)


def _parameters_of(owner: object) -> Iterator[Tensor]:
    if isinstance(owner, torch.optim.Optimizer):
        return iter(parameters_of(owner))
    return iter(owner.parameters()) if isinstance(owner, torch.nn.Module) else iter(())


def _trained(optimizers: Sequence[Optimizer]) -> Iterator[Tensor]:
    return (one for optimizer in optimizers for one in _parameters_of(optimizer) if one.requires_grad)
