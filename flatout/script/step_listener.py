"""The dispatch mode with which StepLook follows a step. Importing this imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from flatout.flops import OperationCount
from flatout.memory.tracking import Tracker
from flatout.script.step_memory import MemorySample
from flatout.signals import raised_by_handler
from flatout.torch_private.dispatch import ListeningMode, without_torch_function

if TYPE_CHECKING:
    from torch import Tensor
    from torch._ops import OpOverload


class StepListener(ListeningMode):
    """Counts memory and FLOPs while it is on; `fault` says why it gave up."""

    def __init__(self, *, follows_memory: bool) -> None:
        super().__init__()
        self.tracker = Tracker(attributed=False, guarded=True) if follows_memory else None
        self.count = OperationCount()
        self.fault: str | None = None
        self.in_backward = False
        """Is what it listens to a backward pass?"""

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that were made while nothing listened."""
        if (tracker := self.tracker) is not None:
            self._guarded(lambda: tracker.hold(tensors, "weights"))

    def memory(self, step: int) -> MemorySample | None:
        return None if self.tracker is None or self.fault is not None else MemorySample.of_tracker(step, self.tracker)

    def listen(self, func: OpOverload[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        out = func(*args, **kwargs)
        self._guarded(lambda: self._see(func, args, kwargs, out))
        return out

    def _see(
        self, operation: OpOverload[..., object], args: tuple[object, ...], kwargs: dict[str, object], out: object
    ) -> None:
        self.count.add(operation, args, kwargs, out)
        if self.tracker is not None:
            if self.in_backward:  # what the loss saved, outside the model
                self.tracker.see_results(operation, (), {}, args)
            self.tracker.see_results(operation, args, kwargs, out)

    def _guarded(self, call: Callable[[], None]) -> None:
        if self.fault is not None:
            return
        try:
            with without_torch_function():  # the script's own modes must not see our operations
                call()
        except Exception as error:
            if raised_by_handler(error):
                raise
            self.fault = f"{type(error).__name__}: {error}"
