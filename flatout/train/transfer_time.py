"""What moving activations to the host and back adds to a step, where it cannot be timed: bytes over the link's rate."""

from __future__ import annotations

from dataclasses import dataclass

from flatout.errors import UsageError
from flatout.machine.bandwidth_peak import transfer_peak
from flatout.machine.published_peaks import GpuEntry, catalogue_entry, published_peaks
from flatout.memory.forecast import Target
from flatout.plan import Plan
from flatout.units import format_bytes

MEASURING_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class TransferTime:
    """Time of a step with the transfers over that without; None: unknown, and `how` says why."""

    ratio: float | None
    how: str


def transfer_time(target: Target, plan: Plan, moved_bytes: int, operations: float) -> TransferTime:
    """For a step of so many floating point operations that moves so many bytes out and in again.

    Both at their ceilings: the link's, measured where that GPU is here and published otherwise, and the published one
    of the plan's dtype. Copies and products share one stream, so their times add up.
    """
    entry, link, source = _figures(target)
    dtype = _dtype(plan)
    if link is None:
        return TransferTime(ratio=None, how=f"unknown, because {source}")
    if entry is None or dtype not in entry.flops_per_second:
        return TransferTime(ratio=None, how=f"unknown, because no peak of {target.name} in {dtype} is published")
    computing_seconds = operations / entry.flops_per_second[dtype]
    moving_seconds = 2 * moved_bytes / link
    return TransferTime(
        ratio=1 + moving_seconds / computing_seconds,
        how=f"{format_bytes(2 * moved_bytes)} a step over the link to the host at {link / 1e9:.1f} GB/s ({source}), "
        f"beside {dtype} products at their published peak",
    )


def _figures(target: Target) -> tuple[GpuEntry | None, float | None, str]:
    """(published figures, bytes a second of the link each way, where that is from or why it is not known)."""
    import torch

    if target.name.startswith("cuda"):
        if not torch.cuda.is_available():
            return None, None, f"{target.name!r} is not here and names no product: name a GPU of the catalogue"
        index = int(target.name.partition(":")[2] or 0)
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
