"""The device that a forecast is for: the model's own, one of this machine, or a GPU of the catalogue.

How much memory it has, and what offloading activations to its host adds to a step, where that cannot be timed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from flatout.environment import cuda_allocator_settings
from flatout.errors import UsageError
from flatout.machine.bandwidth_peak import transfer_peak
from flatout.machine.detect import available_memory_bytes
from flatout.machine.device import device_index
from flatout.machine.published_peaks import GpuEntry, catalogue_entry, published_peaks
from flatout.memory.allocator_settings import AllocatorSettings
from flatout.memory.forecast import Target
from flatout.plan import Plan
from flatout.units import format_bytes

if TYPE_CHECKING:
    import torch
    from torch import nn

CONTEXT_BYTES = 600 * 1024**2
"""Subtracted from a catalogue entry's memory: the driver's context and torch's kernels, some hundred MiB."""
SHARE_OF_HOST_MEMORY = 0.9
"""Of what is available: the rest is for what is not a tensor."""
MEASURING_SECONDS = 0.2
"""Of the link to the host."""


def find_target(device: str | torch.device | None, model: nn.Module) -> Target:
    """The device of that name (or a torch.device), with the allocator's settings of this process's environment.

    UsageError with the nearest names where there is no such device.
    """
    target = _device_named(device, model)
    if not target.cuda:
        return target
    return replace(target, settings=AllocatorSettings.from_text(cuda_allocator_settings()))


def _device_named(device: str | torch.device | None, model: nn.Module) -> Target:
    import torch

    of_model = device is None
    if device is None:
        device = next((one.device for one in model.parameters()), torch.device("cpu"))
    if isinstance(device, torch.device):
        device = str(device)
    names = "it is 'cpu', 'cuda', 'cuda:0' or a GPU of the catalogue, such as 'rtx-4090'"
    if not isinstance(device, str):
        raise UsageError(f"device is {device!r}", limit=names)
    if device in ("cpu", "cpu:0"):
        return Target(name="cpu", cuda=False)
    kind, colon, number = device.partition(":")
    if of_model and kind != "cuda":
        raise UsageError(
            f"the model is on {device!r}",
            limit="memory is known on the CPU and on CUDA",
            remedy="move it there, or name what to forecast for: flatout.forecast(step, batch, device='h100')",
        )
    if kind == "cuda":
        present = torch.cuda.device_count() if torch.cuda.is_available() else None
        if colon and (not number.isdecimal() or (present is not None and int(number) >= present)):
            raise UsageError(f"device is {device!r}", limit=names if present is None else f"{present} GPUs are here")
        if not torch.cuda.is_available():
            return Target(name=device, cuda=True)
        index = int(number) if colon else device_index(torch.device("cuda"))
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


def available_bytes(model: nn.Module) -> int:
    """What a training of `model` may hold on its device now, the model itself included."""
    import torch

    from flatout.memory.tracking import plain_tensors

    device = find_target(None, model).name
    held = (inner for one in (*model.parameters(), *model.buffers()) for inner in plain_tensors(one))
    if device == "cpu":
        held_bytes = sum(one.untyped_storage().nbytes() for one in held)
        return int(SHARE_OF_HOST_MEMORY * available_memory_bytes()) + held_bytes
    free, _ = torch.cuda.mem_get_info(device)
    return int(free) + int(torch.cuda.memory_reserved(device))


def transfer_time(target: Target, plan: Plan, moved_bytes: int, operations: float) -> tuple[float | None, str]:
    """(time of a step with the transfers over that without, how that is known); None: unknown, and why.

    For a step of `operations` floating point operations that moves `moved_bytes` out and back in.

    Both at their ceilings: the link's, measured where that GPU is here and published otherwise, and the published peak
    of the plan's dtype. Copies and products share one stream, so their times add up.
    """
    entry, link, source = _figures(target)
    dtype = _dtype(plan)
    if link is None:
        return None, f"unknown, because {source}"
    if entry is None or dtype not in entry.flops_per_second:
        return None, f"unknown, because no peak of {target.name} in {dtype} is published"
    computing_seconds = operations / entry.flops_per_second[dtype]
    moving_seconds = 2 * moved_bytes / link
    how = (
        f"{format_bytes(2 * moved_bytes)} a step over the link to the host at {link / 1e9:.1f} GB/s ({source}), "
        f"beside {dtype} products at their published peak"
    )
    return 1 + moving_seconds / computing_seconds, how


def _figures(target: Target) -> tuple[GpuEntry | None, float | None, str]:
    """(published figures, bytes a second of the link each way, where that is from or why it is not known)."""
    import torch

    if target.name.startswith("cuda"):
        if not torch.cuda.is_available():
            return None, None, f"{target.name!r} is not here, and is not in the catalogue: name a GPU of the catalogue"
        index = device_index(torch.device(target.name))
        with torch.cuda.device(index):
            peak, why = transfer_peak("cuda", MEASURING_SECONDS, to_device=True, pinned=True)
        entry = published_peaks(torch.cuda.get_device_name(index))[0]
        return entry, peak.value if peak is not None else None, "measured here" if peak is not None else why
    try:
        entry = catalogue_entry(target.name)
    except UsageError as error:
        return None, None, error.what
    if entry.host_bytes_per_second is None:
        return entry, None, f"no rate between {entry.name} and its host is published in the catalogue"
    return entry, entry.host_bytes_per_second, f"PCIe, {entry.sources['host_bytes_per_second'].title}"


def _dtype(plan: Plan) -> str:
    if plan.precision in ("bf16", "fp16"):
        return plan.precision
    return "tf32" if plan.matmul_precision in ("high", "medium") else "fp32"
