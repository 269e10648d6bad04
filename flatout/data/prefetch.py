"""The next batch is copied to the device while the current one is used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

from flatout.data.nested import leaves_in, map_leaves, moves_itself, to_device

if TYPE_CHECKING:
    import torch
    from torch import Tensor

T = TypeVar("T")


def on_device(batches: Iterable[T], device: torch.device, *, pin: bool) -> Iterator[T]:
    """`batches` on `device`. On CUDA one copy runs ahead, on its own stream; on the CPU nothing is copied.

    Objects with a `to` of their own are copied when they are handed out: the allocator could not be told which memory
    of theirs is in use on another stream.
    """
    if device.type != "cuda":
        for batch in batches:
            yield to_device(batch, device)
        return
    import torch

    stream = torch.cuda.Stream(device)
    ahead: T | None = None
    for batch in batches:
        pinned = _map_plain(_pinned, batch) if pin else batch
        with torch.cuda.stream(stream):
            copied = _map_plain(lambda tensor: tensor.to(device, non_blocking=True), pinned)
        if ahead is not None:
            yield to_device(_handed_over(ahead, stream), device)
        ahead = copied
    if ahead is not None:
        yield to_device(_handed_over(ahead, stream), device)


def _map_plain(function: Callable[[Tensor], Tensor], batch: T) -> T:
    """`function` on each of torch's own tensors in there."""
    import torch

    mapped: T = map_leaves(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, batch, moves_itself)
    return mapped


def _pinned(tensor: Tensor) -> Tensor:
    return tensor if tensor.device.type != "cpu" or tensor.is_pinned() else tensor.pin_memory()


def _handed_over(batch: T, stream: torch.cuda.Stream) -> T:
    """The training stream waits for the copy, and the allocator is told that it uses the memory."""
    import torch

    current = torch.cuda.current_stream(stream.device)  # the current device may be another one
    current.wait_stream(stream)
    for _, tensor in leaves_in(batch, "batch", moves_itself):
        if isinstance(tensor, torch.Tensor) and tensor.device.type == "cuda":
            tensor.record_stream(current)
    return batch
