"""Torch's hooks around optimizer steps, invisible to the script."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.optim import Optimizer

Hook = Callable[["Optimizer", object, object], None]
"""(optimizer, args, kwargs) of its `step`."""


class StepHook:
    """One of torch's hooks around every optimizer's step, under a key of our own.

    Registering it with torch would use up one of the ids that also identify the script's hooks.
    """

    def __init__(self, hooks: dict[Any, Callable[..., object]], call: Hook) -> None:  # torch: int keys
        self._hooks, self._call = hooks, call

    def add(self) -> None:
        self._hooks[self] = self._call

    def remove(self) -> None:
        self._hooks.pop(self, None)


class PassedSteps:
    """`hook` lets as many steps of one optimizer pass as were granted, and forwards all others to `otherwise`.

    It runs in every step of a script, each time with cold caches: a closure touches the fewest objects.
    """

    def __init__(self, otherwise: Hook, compiling: Callable[[], bool]) -> None:
        leader = granted = left = 0

        def hook(optimizer: Optimizer, args: object, kwargs: object) -> None:
            nonlocal left
            if compiling():  # torch.compile traces this call, and must trace torch only
                return
            if left and id(optimizer) == leader:
                left -= 1
            else:
                otherwise(optimizer, args, kwargs)

        def grant(identity: int | None, steps: int) -> None:
            nonlocal leader, granted, left
            leader, granted, left = identity or 0, steps, steps

        def passed() -> int:
            return granted - left

        self.hook, self._grant, self._passed = hook, grant, passed
        self._others: list[int] = []
        self._passed_before_others = 0

    def grant(self, identity: int | None, steps: int) -> None:
        """From now on let this many steps of this optimizer pass."""
        self._grant(identity, steps)
        self._others, self._passed_before_others = [], 0

    def note_other(self, identity: int) -> int:
        """Another optimizer has stepped; returns how many such steps followed the last one that passed."""
        self._others = [*self._others_since(), identity]
        self._passed_before_others = self._passed()
        return len(self._others)

    def take(self) -> tuple[int, list[int]]:
        """(steps that passed, the others since the last of them); ends the grant."""
        taken = self._passed(), self._others_since()
        self.grant(None, 0)
        return taken

    def _others_since(self) -> list[int]:
        return self._others if self._passed() == self._passed_before_others else []


def steps_around(frame: FrameType) -> int:
    """How many optimizer steps enclose the one that has just begun; `frame`: that of torch's wrapper around it."""
    wrapper, outer, steps = frame.f_code, frame.f_back, 0
    while outer is not None:
        steps += outer.f_code is wrapper
        outer = outer.f_back
    return steps
