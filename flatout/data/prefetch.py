"""The next batch is copied to the device while the current one is used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

from flatout.data.nested import map_tensors, tensors_in, to_device

if TYPE_CHECKING:
    import torch
    from torch import Tensor

T = TypeVar("T")


def on_device(batches: Iterable[T], device: torch.device, *, pin: bool) -> Iterator[T]:
    """`batches` on `device`. On CUDA one copy runs ahead, on its own stream; on the CPU nothing is copied."""
    if device.type != "cuda":
        for batch in batches:
            yield to_device(batch, device)
        return
    import torch

    stream = torch.cuda.Stream(device)
    ahead: T | None = None
    for batch in batches:
        pinned = map_tensors(_pinned, batch) if pin else batch
        with torch.cuda.stream(stream):
            copied = to_device(pinned, device)
        if ahead is not None:
            yield _handed_over(ahead, stream)
        ahead = copied
    if ahead is not None:
        yield _handed_over(ahead, stream)


def _pinned(tensor: Tensor) -> Tensor:
    return tensor if tensor.device.type != "cpu" or tensor.is_pinned() else tensor.pin_memory()


def _handed_over(batch: T, stream: torch.cuda.Stream) -> T:
    """The training stream waits for the copy, and the allocator is told that it uses the memory."""
    import torch

    current = torch.cuda.current_stream(stream.device)  # the current device may be another one
    current.wait_stream(stream)
    for _, tensor in tensors_in(batch):
        if tensor.device.type == "cuda":
            tensor.record_stream(current)
    return batch
