"""Measure what real steps hold, and end them where they would hold more than a limit.

On CUDA torch's own allocator counts, and the limit is set for it. The CPU's allocator does not count, so tensors'
storages are followed there, and the operation that exceeds the limit raises `torch.OutOfMemoryError`, as CUDA does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from types import TracebackType

import torch

from flatout.memory.tracking import Tracker


class LimitedRun:
    """Use as a context around steps; `peak_bytes` holds what was measured, also after an error."""

    def __init__(self, device: str, limit_bytes: int) -> None:
        """device: 'cpu' or a CUDA device with its number, 'cuda:0'."""
        self.peak_bytes = 0
        self._cuda = device != "cpu"
        self._limit_bytes = limit_bytes
        self._device = torch.device(device)
        self._stack = contextlib.ExitStack()
        self._tracker: Tracker | None = None
        self._fraction_before = 1.0

    def __enter__(self) -> LimitedRun:
        if self._cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)
            total = torch.cuda.get_device_properties(self._device).total_memory
            self._fraction_before = torch.cuda.get_per_process_memory_fraction(self._device)
            torch.cuda.set_per_process_memory_fraction(min(1.0, self._limit_bytes / total), self._device)
        else:
            self._tracker = self._stack.enter_context(Tracker(attributed=False, limit_bytes=self._limit_bytes))
        return self

    def hold(self, tensors: Iterable[object]) -> None:
        """Count tensors that existed before. On CUDA the allocator already counts them."""
        if self._tracker is not None:
            self._tracker.hold(tensors, "weights")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        if self._cuda:
            self.peak_bytes = torch.cuda.max_memory_reserved(self._device)
            torch.cuda.set_per_process_memory_fraction(self._fraction_before, self._device)
            torch.cuda.empty_cache()
        elif self._tracker is not None:
            self.peak_bytes = self._tracker.peak_bytes
