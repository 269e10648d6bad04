"""What planted levers are made of: a name, a claim, and a way to reach into the training."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from flatout.levers.lever import Lever, Verdict, offer
from flatout.levers.observed import Observed
from flatout.levers.subject import Subject
from flatout.machine.description import Machine
from flatout.plan_choices import Exactness

Context = Callable[[Subject], contextlib.AbstractContextManager[None]]


class Planted(Lever):
    """A lever that is made, not written: what it does is the context `act`."""

    plan_field = "cudnn_benchmark"  # any field will do: nothing is saved

    def __init__(self, name: str, claim: Exactness, act: Context) -> None:
        self.name, self.exactness, self._act = name, claim, act  # type: ignore[misc]

    def applies(self, machine: Machine, observed: Observed) -> Verdict:
        return offer(True, reason="planted")

    def apply(self, subject: Subject, value: Any) -> contextlib.AbstractContextManager[None]:
        return self._act(subject)


class Step:
    """An optimizer about to step, or one that has stepped; `number` counts from 1."""

    def __init__(self, optimizer: Any, number: int) -> None:
        self.optimizer, self.number = optimizer, number

    @property
    def parameters(self) -> list[Any]:
        return [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]

    @property
    def all_parameters(self) -> list[Any]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]


def before_step(act: Callable[[Step], Any]) -> Context:
    return _around_steps(act, "register_step_pre_hook")


def after_step(act: Callable[[Step], Any]) -> Context:
    return _around_steps(act, "register_step_post_hook")


def _around_steps(act: Callable[[Step], Any], register: str) -> Context:
    @contextlib.contextmanager
    def context(subject: Subject) -> Iterator[None]:
        import torch

        counts: dict[int, int] = {}

        def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
            counts[id(optimizer)] = counts.get(id(optimizer), 0) + 1
            with torch.no_grad():
                act(Step(optimizer, counts[id(optimizer)]))

        def visit(optimizer: Any) -> Any:
            handle = getattr(optimizer, register)(hook)
            return lambda optimizer: handle.remove()

        with subject.optimizers.each(visit):
            yield

    return context


def on_modules(visit: Callable[[Any], Callable[[], None]]) -> Context:
    """`visit(model)` changes a model and returns what puts it back."""

    @contextlib.contextmanager
    def context(subject: Subject) -> Iterator[None]:
        def visited(module: Any) -> Any:
            undo = visit(module)
            return lambda module: undo()

        with subject.modules.each(visited):
            yield

    return context


def replaced(place: str, name: str, make: Callable[[Any], Any]) -> Context:
    """`place.name` replaced by `make(original)` everywhere in the process."""

    @contextlib.contextmanager
    def context(subject: Subject) -> Iterator[None]:
        import importlib

        head, _, attribute = place.partition(":")
        owner = importlib.import_module(head)
        for part in attribute.split(".") if attribute else ():
            owner = getattr(owner, part)
        original = getattr(owner, name)
        setattr(owner, name, make(original))
        try:
            yield
        finally:
            setattr(owner, name, original)

    return context
