"""The ceilings of this machine, measured.

Each is the rate that an ideal piece of work reaches when only that resource limits it (see the probes in this
folder). Real work is then stated as a share of it: 21 % of the ceiling says more than 2.1 TFLOP/s.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial

from flatout import environment
from flatout.errors import MachineError
from flatout.machine.bandwidth_peak import array_bytes, launch_peak, memory_peak, transfer_peak
from flatout.machine.ceilings import Ceilings, Peak
from flatout.machine.description import Machine
from flatout.machine.disk_peak import disk_peak
from flatout.machine.gemm_peak import CPU_DTYPES, CUDA_DTYPES, gemm_peak
from flatout.machine.nvidia_sensors import NvidiaSensors
from flatout.timing import LoadWatch

BUSY_SHARE = 0.05
"""Of a GPU's time: with less, what was measured there is that GPU's own."""
Progress = Callable[[str], None]
Probe = Callable[[], tuple[Peak | None, str]]


def measure_ceilings(machine: Machine, *, quick: bool = False, progress: Progress | None = None) -> Ceilings:
    """Measure everything on the device where work should run here: in a few seconds if `quick`, else about half a
    minute."""
    import torch

    device = machine.device_kind
    if device == "cuda" and not torch.cuda.is_available():
        raise MachineError("torch cannot use the GPU", remedy="see why with: flatout check")
    seconds = 0.4 if quick else 3.0
    dtypes = CUDA_DTYPES if device == "cuda" else CPU_DTYPES
    probes: dict[str, Probe] = {f"gemm {dtype}": partial(gemm_peak, dtype, device, seconds) for dtype in dtypes}
    probes |= _rate_probes(machine, device, seconds)
    watch = LoadWatch()
    shared = device == "cuda" and _gpu_is_busy(machine.usable_gpus[0].uuid)
    found: dict[str, Peak] = {}
    reasons: dict[str, str] = {}
    for name, probe in probes.items():
        if progress is not None:
            progress(name.removesuffix("_per_second").replace("_", " "))
        peak, reason = probe()
        if peak is None:
            reasons[name] = reason
        else:
            found[name] = peak
    gemm = {dtype: peak for dtype in dtypes if (peak := found.pop(f"gemm {dtype}", None))}
    load = watch.read()
    ceilings = Ceilings(
        device=machine.device_name,
        gemm_flops_per_second=gemm,
        reasons=reasons,
        quick=quick,
        threads=torch.get_num_threads(),
        contended=shared or (load is not None and load.contended),
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        torch_version=str(torch.__version__),
    )
    return ceilings.with_rates(found)


def _gpu_is_busy(uuid: str | None) -> bool:
    """Did others use that GPU in the second before this process does?"""
    with contextlib.closing(NvidiaSensors()) as sensors:
        readings = [one for one in sensors.read() if one.uuid == uuid]
    return any(one.busy_share is not None and one.busy_share >= BUSY_SHARE for one in readings)


def _rate_probes(machine: Machine, device: str, seconds: float) -> dict[str, Probe]:
    """By the name of the field of Ceilings that each fills."""
    free = machine.usable_gpus[0].memory_free_bytes if device == "cuda" else machine.memory_available_bytes
    size = array_bytes(device, free)
    transfer = partial(transfer_peak, device, seconds)
    return {
        "memory_read_bytes_per_second": lambda: (memory_peak(device, size, seconds, copy=False), ""),
        "memory_copy_bytes_per_second": lambda: (memory_peak(device, size, seconds, copy=True), ""),
        "host_to_device_pinned_bytes_per_second": partial(transfer, to_device=True, pinned=True),
        "host_to_device_pageable_bytes_per_second": partial(transfer, to_device=True, pinned=False),
        "device_to_host_pinned_bytes_per_second": partial(transfer, to_device=False, pinned=True),
        "device_to_host_pageable_bytes_per_second": partial(transfer, to_device=False, pinned=False),
        "launches_per_second": lambda: (launch_peak(device, seconds), ""),
        "disk_read_bytes_per_second": lambda: disk_peak(environment.cache_dir(), seconds),
    }
