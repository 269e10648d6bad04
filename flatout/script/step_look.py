"""A closer look at single steps of a run: the peak memory of their tensors, and their FLOPs.

It uses a dispatch mode, but only inside the calls that make up a step: forwards of outermost modules and backward
passes. Between them, where a script plots or evaluates, and after training, nothing listens; what a loss outside the
model saves is seen when the backward pass uses it. CUDA's allocator has statistics of its own; they are read and never
reset, because they are the script's. No error in here may reach the script.

A step is skipped where another dispatch mode is active, and all are once the script uses torch.compile, which would
recompile or give up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from flatout.data.nested import tensors_in
from flatout.levers.subject import Subject
from flatout.script.own_modules import own_imports
from flatout.script.step_memory import MemorySample, known_tensors
from flatout.torch_private.compiler import compile_was_asked_for
from flatout.torch_private.late import dispatch

if TYPE_CHECKING:
    from flatout.script.step_listener import StepListener

T = TypeVar("T")

TOO_SHORT = "the run ended before a step could be inspected"
COMPILED = "compiled code does not show its operations"
NO_MODULE = "the forward pass runs outside of modules"
OTHER_MODE = "the script has a dispatch mode of its own"


@dataclass(frozen=True, kw_only=True)
class StepSeen:
    """One step. None: unknown; `reason` says why there are no FLOPs."""

    memory: MemorySample | None
    flops: float | None
    reason: str = ""


class StepLook:
    """`begin` at a step's start, `end` at its end; the watch calls the rest."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._listener: StepListener | None = None
        self._device = "cpu"
        self._forwards = 0
        self._reason = ""
        self.under_way = False

    def begin(self, device: str, *, compiled: bool) -> None:
        """device: 'cpu' or 'cuda:0', where the weights are. compiled: a plan compiles."""
        self._device, self._forwards, self._listener = device, 0, None
        self._reason = COMPILED if compiled or compile_was_asked_for() else ""
        self.under_way = True
        if not self._reason:
            with own_imports():
                from flatout.script.step_listener import StepListener

                self._listener = StepListener(follows_memory=device == "cpu")
                self._listener.hold(known_tensors(self._subject))

    def forward(self, call: Callable[[], T], inputs: object) -> T:
        """Run `call`; inputs: those of the outermost module."""
        listener = self._free_listener()
        if listener is None:
            return call()
        self._forwards += 1
        listener.hold(tensor for _, tensor in tensors_in(inputs))
        listener.in_backward = False
        with listener:
            return call()

    def around_backward(self, run: Callable[..., T]) -> Callable[..., T]:
        """`run`, inspected."""
        listener = self._free_listener()
        if listener is None:
            return run

        def backward(*args: object, **kwargs: object) -> T:
            listener.in_backward = True
            with listener:
                return run(*args, **kwargs)

        return backward

    def _free_listener(self) -> StepListener | None:
        """None where nothing may listen."""
        if self._listener is not None and compile_was_asked_for():
            self._reason = COMPILED
        elif self._listener is not None and dispatch().current_dispatch_mode() is not None:
            self._reason = OTHER_MODE
        if self._reason:
            self._listener = None
        return self._listener

    def end(self, step: int) -> StepSeen:
        """The result since `begin`."""
        self.under_way = False
        listener, self._listener = self._listener, None
        if listener is not None and not self._forwards:
            self._reason = NO_MODULE
        elif listener is not None and listener.fault is not None:
            self._reason = listener.fault
        if self._reason or listener is None:
            return StepSeen(memory=self._allocators(step), flops=None, reason=self._reason or TOO_SHORT)
        listener.hold(known_tensors(self._subject))
        memory = listener.memory(step) if self._device == "cpu" else self._allocators(step)
        return StepSeen(memory=memory, flops=listener.count.flops)

    def _allocators(self, step: int) -> MemorySample | None:
        return None if self._device == "cpu" else MemorySample.of_cuda(step, self._device)
