"""The ceilings of moving data: memory, transfers to the GPU and back, and the rate at which work can be launched.

An array far larger than every cache is read once; a copy counts what it reads and what it writes.
From pinned host memory a GPU copies by itself; pageable memory goes through a staging buffer of the driver's first.
"""

from __future__ import annotations

from pathlib import Path

from flatout.machine.ceilings import Peak
from flatout.machine.probe import peak_of, timed
from flatout.units import format_bytes

MIB = 1024**2
_CPU_ARRAY_BYTES = 512 * MIB
_CUDA_ARRAY_BYTES = 2048 * MIB
_TRANSFER_BYTES = 256 * MIB
_TIMES_L3 = 4
"""Of all level-3 caches together, of which some servers have more than a gigabyte."""
NO_GPU = "no GPU that torch can use"


def array_bytes(device: str, available_bytes: int | None) -> int:
    """Large enough to defeat caches, small enough to fit into what is free."""
    wanted = _CUDA_ARRAY_BYTES if device == "cuda" else max(_CPU_ARRAY_BYTES, _TIMES_L3 * l3_bytes())
    return wanted if available_bytes is None else max(16 * MIB, min(wanted, available_bytes // 8))


def l3_bytes(cpus: Path = Path("/sys/devices/system/cpu")) -> int:
    """Of the level-3 caches of this machine together; 0 where the system does not show them."""
    sizes = {}
    for folder in cpus.glob("cpu[0-9]*/cache/index3"):
        try:
            size = (folder / "size").read_text().strip()  # '32768K'
            sizes[(folder / "shared_cpu_list").read_text()] = int(size.removesuffix("K")) * 1024
        except (OSError, ValueError):
            continue
    return sum(sizes.values())


def memory_peak(device: str, size_bytes: int, seconds: float, *, copy: bool) -> Peak:
    """Read one array, or copy it to another."""
    import torch

    source = torch.ones(size_bytes // 4, device=device)
    if copy:
        target = torch.empty_like(source)
        found = timed(lambda: target.copy_(source), device, seconds)
        return peak_of(found, 2 * source.nbytes, "B/s", f"{format_bytes(source.nbytes)} read and written")
    found = timed(source.amax, device, seconds)
    return peak_of(found, source.nbytes, "B/s", f"{format_bytes(source.nbytes)} read once")


def transfer_peak(device: str, seconds: float, *, to_device: bool, pinned: bool) -> tuple[Peak | None, str]:
    """From host memory to the GPU or back."""
    import torch

    if device != "cuda":
        return None, NO_GPU
    host = torch.ones(_TRANSFER_BYTES // 4, pin_memory=pinned)
    there = torch.empty_like(host, device=device)
    source, target = (host, there) if to_device else (there, host)
    found = timed(lambda: target.copy_(source, non_blocking=pinned), device, seconds)
    return peak_of(found, host.nbytes, "B/s", f"{format_bytes(host.nbytes)}, {'pinned' if pinned else 'pageable'}"), ""


def launch_peak(device: str, seconds: float) -> Peak:
    """The smallest operation over and over, from one Python thread."""
    import torch

    one = torch.ones(1, device=device)
    burst = 100

    def launches() -> None:
        for _ in range(burst):
            one.add_(1)

    return peak_of(timed(launches, device, seconds), burst, "launches/s", "in-place addition to one number")
