"""The memory of one step: what its tensors held, and their peak.

CUDA's allocator has statistics, which are read and never reset, because they are the script's. The CPU's has none, so
tensors' storages are followed: in a trial through the whole step, in a run as `step_look` says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
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
    """At the end of the step."""
    reserved_bytes: int | None = None
    """CUDA: what the allocator has reserved."""

    @classmethod
    def of_cuda(cls, step: int, device: str) -> MemorySample:
        """What torch's allocator reports now for this device ('cuda:0')."""
        import torch

        return cls(
            step=step,
            peak_bytes=torch.cuda.max_memory_allocated(device),
            held_bytes=torch.cuda.memory_allocated(device),
            reserved_bytes=torch.cuda.memory_reserved(device),
        )

    @classmethod
    def of_tracker(cls, step: int, tracker: Tracker) -> MemorySample | None:
        """What was followed on the CPU; None where that failed."""
        if tracker.fault is not None:
            return None
        return cls(step=step, peak_bytes=tracker.peak_bytes, held_bytes=tracker.held_bytes)

    @property
    def fragmentation(self) -> float | None:
        """CUDA: the share of reserved memory that holds no tensor."""
        return None if not self.reserved_bytes else 1 - self.held_bytes / self.reserved_bytes


def follow_memory(subject: Subject, device: str) -> Callable[[int], MemorySample | None]:
    """In a trial, at a step's start; call the result at its end, with the step's number. It gives None where the step
    could not be measured. device: 'cpu' or 'cuda:0', where the weights are."""
    if device != "cpu":
        return lambda step: MemorySample.of_cuda(step, device)
    from flatout.memory.tracking import Tracker

    following = contextlib.ExitStack()
    tracker = following.enter_context(Tracker(attributed=False, guarded=True))
    tracker.hold(known_tensors(subject), "weights")
    tracker.reset_peak()

    def finish(step: int) -> MemorySample | None:
        following.close()
        return MemorySample.of_tracker(step, tracker)

    return finish


def known_tensors(subject: Subject) -> Iterator[Tensor]:
    """The training state between steps: weights, buffers, gradients, optimizer state."""
    for module in subject.modules:
        yield from (*module.parameters(), *module.buffers())
        yield from (one.grad for one in module.parameters() if one.grad is not None)
    for optimizer in subject.optimizers:
        for state in optimizer.state.values():
            yield from (tensor for _, tensor in tensors_in(state))
