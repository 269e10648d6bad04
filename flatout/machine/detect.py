"""Find out what this machine is, by reading only: no CUDA context, no import of torch, nothing written, nothing raised.

torch's versions are read from its files, because the first import of torch decides how it is set up, and that is up to
the user's script.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import os
import platform
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import psutil

from flatout import __version__, environment
from flatout.machine.cgroup import Cgroup, read_cgroup
from flatout.machine.description import Cpu, Machine, Versions, fingerprint_of
from flatout.machine.kept_ceilings import load_ceilings
from flatout.machine.nvidia import NAMES_MIG, Driver, names_mig, read_driver, visible
from flatout.units import format_bytes

# CPU flags that matter for matrix products. x86 and ARM names do not clash but for 'bf16' and 'i8mm', which are ARM's.
_FEATURES = (
    *("avx2", "avx512f", "avx_vnni", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_bf16", "amx_int8", "amx_fp16", "asimdhp", "sve", "bf16", "i8mm"),
)
# A line of torch/version.py. Not by `ast.parse`, which fails at times in several threads at once (CPython 3.11).
_CONSTANT = re.compile(r"""^(\w+)(?:\s*:[^=]*)?\s*=\s*["']([^"']*)["']""", re.MULTILINE)
_FAST_BY_FEATURE = {
    "bf16": {"avx512_bf16", "amx_bf16", "bf16"},
    "fp16": {"avx512_fp16", "amx_fp16", "asimdhp"},
    "int8": {"avx_vnni", "avx512_vnni", "amx_int8", "i8mm"},
}


def detect() -> Machine:
    """This machine, as it is now, with its ceilings if they were measured before."""
    cgroup, driver = read_cgroup(), read_driver()
    cpu = _cpu(cgroup)
    total, available, limited_by = _memory(cgroup)
    setting = environment.visible_cuda_devices()
    seen = visible(driver.gpus, setting)
    hidden = tuple(gpu.name for gpu in driver.gpus if gpu not in seen)
    reason = driver.reason
    if hidden and not seen:
        reason = f"CUDA_VISIBLE_DEVICES {NAMES_MIG if names_mig(setting) else 'hides them all'}"
    machine = Machine(
        fingerprint=fingerprint_of(cpu, total, seen),
        cpu=cpu,
        memory_total_bytes=total,
        memory_available_bytes=available,
        memory_limited_by=limited_by,
        devices=seen,
        hidden_devices=hidden,
        no_devices_reason=None if seen else reason,
        versions=_versions(driver),
    )
    return machine.with_ceilings(load_ceilings(machine))


def _cpu(cgroup: Cgroup) -> Cpu:
    info = parse_cpuinfo(_read(Path("/proc/cpuinfo")))
    logical = os.cpu_count() or 1
    available, limited_by = available_cores(logical, _allowed_cores(logical), cgroup.quota_cores)
    flags = set(info.get("flags", info.get("Features", "")).split())
    features = tuple(feature for feature in _FEATURES if feature in flags)
    return Cpu(
        name=info.get("model name") or platform.processor() or platform.machine() or "unknown processor",
        model_id=model_id(info),
        physical_cores=_physical_cores(),
        logical_cores=logical,
        available_cores=available,
        limited_by=limited_by,
        features=features,
        fast_dtypes=cpu_fast_dtypes(features),
    )


def _physical_cores() -> int | None:
    """None where the system does not say, as without /proc."""
    try:
        found: int | None = psutil.cpu_count(logical=False)
    except OSError:
        return None
    return found


def parse_cpuinfo(text: str) -> dict[str, str]:
    """The first processor's block of /proc/cpuinfo."""
    pairs = (line.split(":", 1) for line in text.split("\n\n")[0].splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def model_id(info: Mapping[str, str]) -> str:
    """Vendor, family, model and stepping; on ARM, whose blocks have no such lines, what stands for these there."""
    keys = ("vendor_id", "cpu family", "model", "stepping")
    if "CPU implementer" in info:
        keys = ("CPU implementer", "CPU part", "CPU variant", "CPU revision")
    return "-".join(info.get(key, "?") for key in keys)


def cpu_fast_dtypes(features: Iterable[str]) -> tuple[str, ...]:
    """fp32, and each dtype that has its own instructions."""
    have = set(features)
    return ("fp32", *(dtype for dtype, any_of in _FAST_BY_FEATURE.items() if have & any_of))


def available_cores(logical: int, allowed: int, quota_cores: float | None) -> tuple[int, str | None]:
    """How many threads can really run at once, and what limits them. Half a core more would only be throttled."""
    cores, reason = logical, None
    if allowed < cores:
        cores, reason = allowed, f"the CPU affinity allows {allowed} of {logical} cores"
    if quota_cores is not None and quota_cores < cores:
        cores = max(1, math.floor(quota_cores))
        reason = f"the cgroup allows {quota_cores:g} of {logical} cores"
    return cores, reason


def usable_cores() -> int:
    """How many threads of this process can really run at once: by affinity and cgroup."""
    logical = os.cpu_count() or 1
    return available_cores(logical, _allowed_cores(logical), read_cgroup().quota_cores)[0]


def _allowed_cores(logical: int) -> int:
    """By affinity; macOS and Windows do not report it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else logical


def available_memory_bytes() -> int:
    """What this process may still take: the system's free memory, or what its cgroup leaves."""
    return memory_left()[0]


def memory_left() -> tuple[int, int]:
    """(bytes that this process may still take, bytes that it may have in total)."""
    total, available, _ = _memory(read_cgroup())
    return available, total


def _memory(cgroup: Cgroup) -> tuple[int, int, str | None]:
    total, available = _host_memory()
    limit, used = cgroup.memory_limit_bytes, cgroup.memory_used_bytes
    if limit is None or limit >= total:
        return total, available, None
    reason = f"the cgroup allows {format_bytes(limit)} of {format_bytes(total)}"
    return limit, max(0, min(available, limit - (used or 0))), reason


def _host_memory() -> tuple[int, int]:
    """(bytes in total, bytes available), without a library: this is read while the user's script runs."""
    if not os.path.exists("/proc/meminfo"):  # macOS, Windows, and where no /proc is mounted
        return _without_proc()
    sizes = {}
    with open("/proc/meminfo") as file:
        for line in file:
            name, _, rest = line.partition(":")
            sizes[name] = int(rest.split()[0]) * 1024
    return sizes["MemTotal"], sizes.get("MemAvailable", sizes["MemFree"])


def _without_proc() -> tuple[int, int]:
    try:
        memory = psutil.virtual_memory()
    except OSError:  # Linux, where psutil reads /proc too
        page = os.sysconf("SC_PAGE_SIZE")
        return page * os.sysconf("SC_PHYS_PAGES"), page * os.sysconf("SC_AVPHYS_PAGES")
    return memory.total, memory.available


def torch_version() -> str | None:
    """Of the torch that is installed, with its build ('2.13.0+cpu'); it is not imported. None: there is none."""
    return _torch_build().get("__version__") or installed_version("torch")


def _versions(driver: Driver) -> Versions:
    build = _torch_build()
    return Versions(
        python=platform.python_version(),
        operating_system=f"{platform.system()} {platform.release()}",
        flatout=__version__,
        torch=build.get("__version__") or installed_version("torch"),
        cuda=build.get("cuda"),
        cudnn=_first_installed("nvidia-cudnn-cu13", "nvidia-cudnn-cu12") if build.get("cuda") else None,
        nccl=_first_installed("nvidia-nccl-cu13", "nvidia-nccl-cu12") if build.get("cuda") else None,
        driver=driver.version,
        driver_cuda=driver.newest_cuda,
    )


def _torch_build() -> dict[str, str]:
    """The constants in torch/version.py, read without running it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return {}
    return dict(_CONSTANT.findall(_read(Path(spec.origin).parent / "version.py")))


def installed_version(package: str) -> str | None:
    """None: it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _first_installed(*packages: str) -> str | None:
    return next((version for package in packages if (version := installed_version(package))), None)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
