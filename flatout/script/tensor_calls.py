"""Conversions of tensors, by line of the script.

A conversion counts as repeated where the same tensor, unchanged, was converted to the same before. Where the script
trains on a GPU, these calls and those that read a value are also noted while they last: the host waits in them.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flatout.script.behaviour_seen import CallSeen
from flatout.script.device_calls import ASKING
from flatout.script.patches import Patches, around
from flatout.script.places import Places

if TYPE_CHECKING:
    from torch import Tensor

CONVERTING = ("to", "cuda", "float", "double", "half", "bfloat16", "long", "int", "type")
MOST_REMEMBERED = 512


@dataclass
class _Sums:
    calls: int = 0
    seconds: float = 0.0
    repeated: int = 0


class TensorCalls:
    """Between `start` and `stop`, in the thread in which it was made."""

    def __init__(self, places: Places, guard: Callable[[Callable[[], None]], None]) -> None:
        self._places, self._guard = places, guard
        self._patches = Patches()
        self._thread = threading.get_ident()
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
            self._patches.replace(torch.Tensor, name, self._converting(name))
        for name in (*ASKING, "__repr__") if on_gpu else ():
            self._patches.replace(torch.Tensor, name, around(self._reads, self._has_read))

    def stop(self) -> None:
        self._on = False
        self._patches.undo()
        self._converted.clear()

    def _listens(self) -> bool:
        return self._on and not self.own and threading.get_ident() == self._thread

    def _converting(self, name: str) -> Callable[[Callable[..., object]], Callable[..., object]]:
        def begins(tensor: Tensor, *_: object, **__: object) -> tuple[Tensor, float, bool] | None:
            if self._inside or not self._listens():
                return None
            began = tensor, time.perf_counter(), self.waiting
            self._inside, self.waiting = True, self._on_gpu
            return began

        def ended(begun: tuple[Tensor, float, bool], result: object) -> None:
            tensor, began, waited = begun
            seconds = time.perf_counter() - began
            self._inside, self.waiting = False, waited
            if result is not tensor:
                self._guard(lambda: self._note_conversion(name, tensor, result, seconds))

        return around(begins, ended)

    def _reads(self, *_: object, **__: object) -> tuple[bool] | None:
        """A method that returns a value, or prints it, begins."""
        if not self._listens():
            return None
        waited, self.waiting = self.waiting, True
        return (waited,)

    def _has_read(self, begun: tuple[bool], result: object) -> None:
        (self.waiting,) = begun

    def _note_conversion(self, name: str, tensor: Tensor, result: object, seconds: float) -> None:
        from torch import Tensor

        if not isinstance(result, Tensor) or tensor.requires_grad:
            return  # a part of the computation
        sums = self._sums.setdefault((name, self._places.here()), _Sums())
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
            CallSeen(method=method, line=self._places.line(place), **vars(one))
            for (method, place), one in self._sums.items()
        )
