"""The memory of one step: what its tensors held, and at the most.

CUDA's allocator keeps books, which are read and never reset: they are the script's. The CPU's does not, so tensors'
storages are followed: in a trial all through the step, in a run that goes on as `step_look` says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flatout.data.nested import tensors_in
from flatout.levers.subject import Subject

if TYPE_CHECKING:
    from torch import Tensor

    from flatout.memory.tracking import Tracker


@dataclass(frozen=True, kw_only=True)
class MemorySample:
    """One step. On the CPU: its tensors. On CUDA: torch's allocator, whose peak is that of the whole run so far."""

    step: int
    peak_bytes: int
    held_bytes: int
    """When the step had ended."""
    reserved_bytes: int | None = None
    """CUDA: what the allocator has from the driver."""

    @classmethod
    def of_cuda(cls, step: int, device: str) -> MemorySample:
        """What torch's allocator says now of that device ('cuda:0')."""
        import torch

        return cls(
            step=step,
            peak_bytes=torch.cuda.max_memory_allocated(device),
            held_bytes=torch.cuda.memory_allocated(device),
            reserved_bytes=torch.cuda.memory_reserved(device),
        )

    @property
    def fragmentation(self) -> float | None:
        """CUDA: the share of the reserved memory that no tensor is in."""
        return None if not self.reserved_bytes else 1 - self.held_bytes / self.reserved_bytes


class StepMemory:
    """In a trial: `begin` at a step's start, `end` at its end."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._stack: contextlib.ExitStack | None = None
        self._tracker: Tracker | None = None
        self._device = "cpu"

    @property
    def under_way(self) -> bool:
        return self._stack is not None

    def begin(self, device: str) -> None:
        """device: 'cpu' or 'cuda:0', where the weights are."""
        self._stack = contextlib.ExitStack()
        self._tracker = None
        self._device = device
        if device == "cpu":
            from flatout.memory.tracking import Tracker

            self._tracker = self._stack.enter_context(Tracker(attributed=False, guarded=True))
            self._tracker.hold(known_tensors(self._subject), "weights")
            self._tracker.reset_peak()

    def end(self, step: int) -> MemorySample | None:
        """None where it could not be told."""
        if self._stack is None:
            return None
        self._stack.close()
        self._stack = None
        if self._tracker is not None:
            tracker, self._tracker = self._tracker, None
            if tracker.fault is not None:
                return None
            return MemorySample(step=step, peak_bytes=tracker.peak_bytes, held_bytes=tracker.held_bytes)
        return MemorySample.of_cuda(step, self._device)


def known_tensors(subject: Subject) -> Iterator[Tensor]:
    """What is there between steps and is the training's: weights, buffers, gradients, optimizer state."""
    for module in subject.modules:
        yield from (*module.parameters(), *module.buffers())
        yield from (one.grad for one in module.parameters() if one.grad is not None)
    for optimizer in subject.optimizers:
        for state in optimizer.state.values():
            yield from (tensor for _, tensor in tensors_in(state))
