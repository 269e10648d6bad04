"""Levers made to fail, each in its own way, for a script that sleeps a little every step (`time.sleep`)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from flatout.levers.lever import Lever, Verdict, offer
from flatout.levers.observed import Observed
from flatout.levers.subject import Subject
from flatout.machine.description import Machine

HELD: list[Any] = []


class Planted(Lever):
    exactness = "rounding"
    acts_on_forward = True

    def applies(self, machine: Machine, observed: Observed) -> Verdict:
        return offer(True, reason="planted")


class Helps(Planted):
    name = "helps"
    plan_field = "cudnn_benchmark"
    exactness = "bit-identical"

    @contextlib.contextmanager
    def apply(self, subject: Subject, value: Any) -> Iterator[None]:
        with quicker(8):
            yield


class Corrupts(Planted):
    """Fast, and every gradient a tenth of a percent too large."""

    name = "corrupts gradients"
    plan_field = "flush_denormals"

    @contextlib.contextmanager
    def apply(self, subject: Subject, value: Any) -> Iterator[None]:
        def visit(optimizer: Any) -> Any:
            def before(optimizer: Any, args: Any, kwargs: Any) -> None:
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.grad.mul_(1.001)

            hook = optimizer.register_step_pre_hook(before)
            return lambda optimizer: hook.remove()

        with quicker(), subject.optimizers.each(visit):
            yield


@contextlib.contextmanager
def quicker(times: float = 2) -> Iterator[None]:
    """Sleep less, so that several levers can each be faster than what went before."""
    before = time.sleep
    time.sleep = lambda seconds: before(seconds / times)
    try:
        yield
    finally:
        time.sleep = before


class Slower(Planted):
    name = "slower"
    plan_field = "threads"

    def apply(self, subject: Subject, value: Any) -> Any:
        def wrapper(module: Any, call: Any) -> Any:
            end = time.perf_counter() + 0.05  # five times the step: no busy machine hides it
            while time.perf_counter() < end:
                pass
            return call()

        return subject.around_calls(wrapper)


class Raises(Planted):
    name = "raises"
    plan_field = "memory_format"

    def apply(self, subject: Subject, value: Any) -> Any:
        def wrapper(module: Any, call: Any) -> Any:
            raise RuntimeError("planted failure")

        return subject.around_calls(wrapper)


class RaisesInBackward(Planted):
    name = "raises in backward"
    plan_field = "optimizer"

    def apply(self, subject: Subject, value: Any) -> Any:
        def wrapper(tensors: Any, run: Any) -> Any:
            raise RuntimeError("planted failure of a backward pass")

        return subject.around_backward(wrapper)


class Hangs(Planted):
    name = "hangs"
    plan_field = "precision"

    def apply(self, subject: Subject, value: Any) -> Any:
        def wrapper(module: Any, call: Any) -> Any:
            while True:
                pass

        return subject.around_calls(wrapper)


class Leaks(Planted):
    name = "leaks"
    plan_field = "compile"

    @contextlib.contextmanager
    def apply(self, subject: Subject, value: Any) -> Iterator[None]:
        def wrapper(module: Any, call: Any) -> Any:
            HELD.append(b"x" * (1 << 20))
            return call()

        with quicker(), subject.around_calls(wrapper):
            yield


HELPING = (Helps(),)
LEVERS = (Slower(), Raises(), RaisesInBackward(), Hangs(), Leaks(), Corrupts(), Helps())
