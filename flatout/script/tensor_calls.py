"""Conversions of tensors, by line of the script.

A conversion counts as repeated where the same tensor, unchanged, was converted to the same before. Where the script
trains on a GPU, these calls and those that read a value are also noted while they last: the host waits in them.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flatout.script.behaviour_seen import CallSeen
from flatout.script.device_calls import ASKING
from flatout.script.patches import Patches
from flatout.script.places import Places
from flatout.tracebacks import leave_no_frame

if TYPE_CHECKING:
    from torch import Tensor

CONVERTING = ("to", "cuda", "float", "double", "half", "bfloat16", "long", "int", "type")
MOST_REMEMBERED = 512
Call = Callable[..., object]


@dataclass
class _Sums:
    calls: int = 0
    seconds: float = 0.0
    repeated: int = 0


class TensorCalls:
    """Between `start` and `stop`."""

    def __init__(self, places: Places, guard: Callable[[Callable[[], None]], None]) -> None:
        self._places, self._guard = places, guard
        self._patches = Patches()
        self._sums: dict[tuple[str, tuple[str, int]], _Sums] = {}
        self._converted: dict[tuple[int, str], tuple[weakref.ref[Tensor], int]] = {}
        self._on = self._inside = self._on_gpu = False
        self.own = False
        """Is what is called now a part of the watching?"""
        self.waiting = False
        """Is the script in a call that may wait for the GPU?"""

    def start(self, *, on_gpu: bool = False) -> None:
        """on_gpu: does the script train on one?"""
        import torch

        self._on, self._on_gpu = True, on_gpu
        for name in CONVERTING:
            self._patches.replace(torch.Tensor, name, self._wrapper(name))
        for name in (*ASKING, "__repr__") if on_gpu else ():
            self._patches.replace(torch.Tensor, name, self._wrap_reading)

    def stop(self) -> None:
        self._on = False
        self._patches.undo()
        self._converted.clear()

    def _wrapper(self, name: str) -> Callable[[Call], Call]:
        return lambda original: self._wrap(original, name)

    def _wrap(self, original: Call, name: str) -> Call:
        def call(tensor: Tensor, *args: object, **kwargs: object) -> object:
            if not self._on or self._inside or self.own:
                return original(tensor, *args, **kwargs)
            self._inside, began = True, time.perf_counter()
            waited, self.waiting = self.waiting, self._on_gpu
            try:
                result = original(tensor, *args, **kwargs)
            except BaseException as error:
                leave_no_frame(error)
                raise
            finally:
                self._inside, self.waiting = False, waited
            seconds = time.perf_counter() - began
            if result is not tensor:
                self._guard(lambda: self._note_conversion(name, tensor, result, seconds))
            return result

        return call

    def _wrap_reading(self, original: Call) -> Call:
        """Of a method that returns a value, or prints it."""

        def call(tensor: Tensor, *args: object, **kwargs: object) -> object:
            if not self._on or self.own:
                return original(tensor, *args, **kwargs)
            waited, self.waiting = self.waiting, True
            try:
                return original(tensor, *args, **kwargs)
            except BaseException as error:
                leave_no_frame(error)
                raise
            finally:
                self.waiting = waited

        return call

    def _at(self, name: str) -> _Sums:
        return self._sums.setdefault((name, self._places.here(3)), _Sums())

    def _note_conversion(self, name: str, tensor: Tensor, result: object, seconds: float) -> None:
        from torch import Tensor

        if not isinstance(result, Tensor) or tensor.requires_grad:
            return  # a part of the computation
        sums = self._at(name)
        sums.calls += 1
        sums.seconds += seconds
        if tensor.is_inference():
            return  # it has no version that would tell whether it has changed
        key = (id(tensor), f"{result.dtype} {result.device}")
        known = self._converted.get(key)
        version = tensor._version
        if known is not None and known[0]() is tensor and known[1] == version:
            sums.repeated += 1
        if len(self._converted) >= MOST_REMEMBERED:
            self._converted.clear()
        self._converted[key] = (weakref.ref(tensor), version)

    def found(self) -> tuple[CallSeen, ...]:
        return tuple(
            CallSeen(
                method=method,
                line=self._places.line(place),
                calls=one.calls,
                seconds=one.seconds,
                repeated=one.repeated,
            )
            for (method, place), one in self._sums.items()
        )
