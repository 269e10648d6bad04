"""The dispatch mode with which StepLook follows a step. Importing this imports torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from flatout.data.nested import tensors_in
from flatout.memory.tracking import Tracker
from flatout.script.step_memory import MemorySample
from flatout.signals import raised_by_handler
from flatout.torch_private.dispatch import ListeningMode, current_dispatch_mode, without_torch_function
from flatout.train.flops import OperationCount

if TYPE_CHECKING:
    from torch import Tensor
    from torch._ops import OpOverload


class StepListener:
    """Counts memory and FLOPs while `listening`; `fault` says why it gave up."""

    def __init__(self, *, follows_memory: bool) -> None:
        self.tracker = Tracker(attributed=False, guarded=True) if follows_memory else None
        self.count = OperationCount()
        self.fault: str | None = None

    @property
    def flops(self) -> float:
        return self.count.flops

    def others_listen(self) -> bool:
        return current_dispatch_mode() is not None

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that were made while nothing listened."""
        with self._guarded():
            if self.tracker is not None:
                self.tracker.hold(tensors, "weights")

    def hold_inputs(self, inputs: object) -> None:
        with self._guarded():
            self.hold(tensor for _, tensor in tensors_in(inputs))

    def memory(self, step: int) -> MemorySample | None:
        if self.tracker is None or self.tracker.fault is not None or self.fault is not None:
            return None
        return MemorySample(step=step, peak_bytes=self.tracker.peak_bytes, held_bytes=self.tracker.held_bytes)

    def listening(self, *, backward: bool = False) -> _Mode:
        return _Mode(self, backward)

    def seen(
        self,
        operation: OpOverload[..., object],
        args: tuple[object, ...],
        kwargs: dict[str, object],
        out: object,
        backward: bool,
    ) -> None:
        with self._guarded():
            self.count.add(operation, args, kwargs, out)
            if self.tracker is not None:
                if backward:  # what the loss saved, outside the model
                    self.tracker.see_results(operation, (), {}, args)
                self.tracker.see_results(operation, args, kwargs, out)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        if self.fault is not None:
            yield
            return
        try:
            with without_torch_function():  # the script's own modes must not see our operations
                yield
        except Exception as error:
            if raised_by_handler(error):
                raise
            self.fault = f"{type(error).__name__}: {error}"


class _Mode(ListeningMode):
    def __init__(self, listener: StepListener, backward: bool) -> None:
        super().__init__()
        self._listener, self._backward = listener, backward

    def listen(self, func: OpOverload[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        out = func(*args, **kwargs)
        if self._listener.fault is None:
            self._listener.seen(func, args, kwargs, out, self._backward)
        return out
