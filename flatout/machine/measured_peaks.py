"""The ceilings of this machine, measured; and kept, one file a machine, device and torch version.

Each is the rate that an ideal piece of work reaches when only that resource limits it (see the probes beside this
file). Real work is then stated as a share of it: 21 % of the ceiling says more than 2.1 TFLOP/s.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flatout import environment
from flatout.errors import MachineError
from flatout.machine.bandwidth_peak import array_bytes, launch_peak, memory_peak, transfer_peak
from flatout.machine.ceilings import Ceilings, Peak
from flatout.machine.description import Machine
from flatout.machine.disk_peak import disk_peak
from flatout.machine.gemm_peak import CPU_DTYPES, CUDA_DTYPES, gemm_peak
from flatout.timing import LoadWatch

__all__ = ["Ceilings", "Peak", "load_ceilings", "measure_ceilings", "save_ceilings"]

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
    probes = {f"gemm {dtype}": _gemm_probe(dtype, device, seconds) for dtype in dtypes}
    probes |= _rate_probes(machine, device, seconds)
    watch = LoadWatch()
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
    rates: dict[str, Any] = dict(found)
    load = watch.read()
    return Ceilings(
        device=machine.device_name,
        gemm_flops_per_second=gemm,
        **rates,
        reasons=reasons,
        quick=quick,
        threads=torch.get_num_threads(),
        contended=load is not None and load.contended,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        torch_version=str(torch.__version__),
    )


def _gemm_probe(dtype: str, device: str, seconds: float) -> Probe:
    return lambda: gemm_peak(dtype, device, seconds)


def _rate_probes(machine: Machine, device: str, seconds: float) -> dict[str, Probe]:
    """By the name of the field of Ceilings that each fills."""
    free = machine.usable_gpus[0].memory_free_bytes if device == "cuda" else machine.memory_available_bytes
    size = array_bytes(device, free)

    def transfer(*, to_device: bool, pinned: bool) -> Probe:
        return lambda: transfer_peak(device, seconds, to_device=to_device, pinned=pinned)

    return {
        "memory_read_bytes_per_second": lambda: (memory_peak(device, size, seconds, copy=False), ""),
        "memory_copy_bytes_per_second": lambda: (memory_peak(device, size, seconds, copy=True), ""),
        "host_to_device_pinned_bytes_per_second": transfer(to_device=True, pinned=True),
        "host_to_device_pageable_bytes_per_second": transfer(to_device=True, pinned=False),
        "device_to_host_pinned_bytes_per_second": transfer(to_device=False, pinned=True),
        "device_to_host_pageable_bytes_per_second": transfer(to_device=False, pinned=False),
        "launches_per_second": lambda: (launch_peak(device, seconds), ""),
        "disk_read_bytes_per_second": lambda: disk_peak(environment.cache_dir(), seconds),
    }


def load_ceilings(machine: Machine, device: str | None = None) -> Ceilings | None:
    """What was measured before of that device ('cpu', 'cuda:0'; None: where work should run here) with this torch.

    None if nothing was, or the file is damaged: another device's ceilings say nothing about this one.
    """
    device = device or machine.device_name
    try:
        found = Ceilings.from_json(json.loads(_cache_file(machine, device).read_text()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # absent, not JSON, or of another shape
        return None
    return found if found.device == device else None


def save_ceilings(machine: Machine, ceilings: Ceilings) -> Path:
    """Keep them for the next time; a reader sees the old file or the new one, never half of one.

    Those of a busy minute, or of fewer threads, are too low: they only raise what was kept before.
    """
    path, before = _cache_file(machine, ceilings.device), load_ceilings(machine, ceilings.device)
    if before is not None and (ceilings.contended or ceilings.threads < before.threads):
        ceilings = before.raised_by(ceilings)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".ceilings-", delete=False) as file:
            json.dump(ceilings.to_json(), file, indent=1)
        os.replace(file.name, path)
    except OSError as error:
        raise MachineError(
            f"cannot keep the ceilings in {path.parent}: {error.strerror}",
            remedy="name another folder in FLATOUT_CACHE_DIR",
        ) from error
    return path


def _cache_file(machine: Machine, device: str) -> Path:
    name = f"{machine.fingerprint}-{device.replace(':', '-')}-torch-{machine.versions.torch}.json"
    return environment.cache_dir() / "ceilings" / name
