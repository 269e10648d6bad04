"""Saving during training: a copy of the tensors on the host, and one thread that writes it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import torch

from flatout.checkpoint.storages import Slot


class HostCopies:
    """Copies of tensors on the host, in the same buffers each time: new memory costs more than the copy itself.

    Buffers for CUDA tensors are page-locked, so that all copies run at once, at the full rate of the bus.
    """

    def __init__(self) -> None:
        self._buffers: dict[Slot, torch.Tensor] = {}

    def take(self, tensors: Mapping[Slot, torch.Tensor]) -> dict[Slot, torch.Tensor]:
        """Copies that later changes of the tensors do not reach; the copies of the call before are overwritten."""
        # what no longer fits is freed first: never more than one copy in memory
        self._buffers = {slot: one for slot, one in self._buffers.items() if _fits(one, tensors.get(slot))}
        devices = set()
        for slot, tensor in tensors.items():
            if slot not in self._buffers:
                pinned = tensor.is_cuda
                self._buffers[slot] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
            self._buffers[slot].copy_(tensor, non_blocking=tensor.is_cuda)
            if tensor.is_cuda:
                devices.add(tensor.device)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return dict(self._buffers)

    def release(self) -> None:
        """Give the memory back."""
        self._buffers.clear()


def _fits(buffer: torch.Tensor, tensor: torch.Tensor | None) -> bool:
    return (
        tensor is not None
        and buffer.shape == tensor.shape
        and buffer.dtype == tensor.dtype
        and buffer.is_pinned() == tensor.is_cuda
    )


class BackgroundWork:
    """One task at a time on its own thread; the next `wait` raises what it raised.

    It is not a daemon thread: the interpreter waits for it before it exits.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def start(self, work: Callable[[], None]) -> None:
        assert self._thread is None, "wait for the work before"
        thread = threading.Thread(target=self._run, args=(work,), name="flatout-checkpoint")
        thread.start()  # may fail, and then there is nothing to wait for
        self._thread = thread

    def join(self) -> None:
        """Wait until nothing is in flight; a failure is kept for `wait`."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def wait(self) -> None:
        """Wait until nothing is in flight, and raise what the work raised, once."""
        self.join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # a thread has no caller to raise to: `wait` does it
            self._failure = error
