"""Which device a forecast is for: the model's own, one of this machine, or a GPU of the catalogue."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flatout.environment import cuda_allocator_settings
from flatout.errors import UsageError
from flatout.machine.published_peaks import catalogue_entry
from flatout.memory.allocator_settings import AllocatorSettings
from flatout.memory.forecast import Target

CONTEXT_BYTES = 600 * 1024**2
"""Taken off a catalogue entry's memory: the driver's context and torch's kernels, some hundred MiB."""


def find_target(device: Any, model: Any) -> Target:
    """The device of that name (or a torch.device), with the allocator's settings of this process's environment.

    UsageError with the nearest names where there is no such device.
    """
    target = _device_named(device, model)
    text = cuda_allocator_settings()
    return replace(target, settings=AllocatorSettings.from_text(text)) if target.cuda and text else target


def _device_named(device: Any, model: Any) -> Target:
    import torch

    if device is None:
        device = next((one.device for one in model.parameters()), "cpu")
    if isinstance(device, torch.device):
        device = str(device)
    names = "it is 'cpu', 'cuda', 'cuda:0' or a GPU of the catalogue, such as 'rtx-4090'"
    if not isinstance(device, str):
        raise UsageError(f"device is {device!r}", limit=names)
    if device == "cpu":
        return Target(name="cpu", cuda=False)
    kind, colon, number = device.partition(":")
    if kind == "cuda":
        present = torch.cuda.device_count() if torch.cuda.is_available() else None
        if colon and (not number.isdecimal() or (present is not None and int(number) >= present)):
            raise UsageError(f"device is {device!r}", limit=names if present is None else f"{present} GPUs are here")
        if not torch.cuda.is_available():
            return Target(name=device, cuda=True)
        index = int(number) if colon else torch.cuda.current_device()
        properties = torch.cuda.get_device_properties(index)
        return Target(
            name=f"cuda:{index}",
            cuda=True,
            capacity_bytes=properties.total_memory,
            compute_capability=(properties.major, properties.minor),
            multiprocessors=properties.multi_processor_count,
        )
    entry = catalogue_entry(device)
    return Target(
        name=entry.key,
        cuda=True,
        capacity_bytes=entry.memory_bytes - CONTEXT_BYTES,
        compute_capability=entry.compute_capability,
        multiprocessors=entry.multiprocessors,
    )
