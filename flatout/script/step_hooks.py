"""Torch's hooks around optimizer steps, without a trace in what the script sees."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType
from typing import Any


class StepHook:
    """One of torch's hooks around every optimizer's step, under a key of our own.

    To register it with torch would take one of the numbers that also name the script's hooks.
    """

    def __init__(self, hooks: dict[Any, Any], call: Callable[[Any, Any, Any], None]) -> None:
        self._hooks, self._call = hooks, call

    def add(self) -> None:
        self._hooks[self] = self._call

    def remove(self) -> None:
        self._hooks.pop(self, None)


def steps_around(frame: FrameType) -> int:
    """How many optimizer steps the one that has just begun lies in; `frame` is that of torch's wrapper around it."""
    wrapper, outer, steps = frame.f_code, frame.f_back, 0
    while outer is not None:
        steps += outer.f_code is wrapper
        outer = outer.f_back
    return steps
