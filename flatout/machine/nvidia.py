"""What the NVIDIA driver reports of its GPUs, through NVML, which creates no CUDA context.

Asking torch instead would start CUDA in this process: it costs memory on the GPU, and forked workers could then no
longer use it. Every query may be refused (a virtual GPU, MIG, another container's process): then the answer is None.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ParamSpec, Protocol, TypeVar

import psutil
import pynvml

from flatout.machine.description import Gpu, GpuProcess

# FP32 cores in a multiprocessor, by compute capability (CUDA C++ Programming Guide, arithmetic throughput table).
_CORES_PER_MULTIPROCESSOR = {
    (7, 0): 64,
    (7, 5): 64,
    (8, 0): 64,
    (8, 6): 128,
    (8, 9): 128,
    (9, 0): 128,
    (10, 0): 128,
    (10, 3): 128,
    (12, 0): 128,
}

NAMES_MIG = "names a MIG instance, of which Flatout knows nothing"

P = ParamSpec("P")
T = TypeVar("T")


class _Process(Protocol):
    """A process as NVML lists it."""

    pid: int
    usedGpuMemory: int | None


@dataclass(frozen=True, kw_only=True)
class Driver:
    """All GPUs of the machine, visible or not; or the reason why there are none."""

    version: str | None = None
    newest_cuda: str | None = None
    gpus: tuple[Gpu, ...] = ()
    reason: str | None = None


def read_driver() -> Driver:
    """Query NVML; a missing driver is a result, not an error."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        return Driver(reason="no NVIDIA driver is installed")
    except pynvml.NVMLError as error:
        return Driver(reason=f"the NVIDIA driver does not answer: {error}")
    try:
        version = _ask(pynvml.nvmlSystemGetDriverVersion)
        cuda = _ask(pynvml.nvmlSystemGetCudaDriverVersion_v2)  # 12080 means 12.8
        count = _ask(pynvml.nvmlDeviceGetCount) or 0
        gpus = tuple(gpu for index in range(count) if (gpu := _read_gpu(index, version)) is not None)
    finally:
        pynvml.nvmlShutdown()
    return Driver(
        version=version,
        newest_cuda=None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
        gpus=gpus,
        reason=None if gpus else "the NVIDIA driver lists no GPU",
    )


def _ask(query: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
    try:
        return query(*args, **kwargs)
    except pynvml.NVMLError:
        return None


def _read_gpu(index: int, driver: str | None) -> Gpu | None:
    handle = _ask(pynvml.nvmlDeviceGetHandleByIndex, index)
    if handle is None:
        return None
    capability = _ask(pynvml.nvmlDeviceGetCudaComputeCapability, handle)
    capability = None if capability is None else (int(capability[0]), int(capability[1]))
    memory = _ask(pynvml.nvmlDeviceGetMemoryInfo, handle)
    return Gpu(
        name=_ask(pynvml.nvmlDeviceGetName, handle) or "unnamed NVIDIA GPU",
        index=index,
        uuid=_ask(pynvml.nvmlDeviceGetUUID, handle),
        compute_capability=capability,
        memory_total_bytes=None if memory is None else int(memory.total),
        memory_free_bytes=None if memory is None else int(memory.free),
        multiprocessors=_multiprocessors(_ask(pynvml.nvmlDeviceGetNumGpuCores, handle), capability),
        driver=driver,
        fast_dtypes=fast_dtypes(capability),
        processes=_others(_ask(pynvml.nvmlDeviceGetComputeRunningProcesses, handle) or ()),
    )


def _multiprocessors(cores: int | None, capability: tuple[int, int] | None) -> int | None:
    per = None if capability is None else _CORES_PER_MULTIPROCESSOR.get(capability)
    return None if cores is None or per is None else cores // per


def fast_dtypes(capability: tuple[int, int] | None) -> tuple[str, ...]:
    """What the matrix units of that generation support: fp16 and int8 since Volta/Turing, bf16 and TF32 since Ampere,
    fp8 since Ada and Hopper."""
    if capability is None:
        return ()
    since = {"fp32": (0, 0), "tf32": (8, 0), "bf16": (8, 0), "fp16": (7, 0), "fp8": (8, 9), "int8": (7, 5)}
    return tuple(dtype for dtype, first in since.items() if capability >= first)


def listed_processes(listed: Iterable[_Process]) -> tuple[GpuProcess, ...]:
    """As NVML lists them, with their names."""
    return tuple(
        GpuProcess(pid=process.pid, name=_process_name(process.pid), memory_bytes=process.usedGpuMemory)
        for process in listed
    )


def _others(listed: Iterable[_Process]) -> tuple[GpuProcess, ...]:
    """Processes that are not this one."""
    return tuple(process for process in listed_processes(listed) if process.pid != os.getpid())


def _process_name(pid: int) -> str | None:
    try:
        return str(psutil.Process(pid).name())
    except psutil.Error:
        return None


class _Numbered(Protocol):
    """A GPU, by whatever is known of it."""

    @property
    def index(self) -> int: ...

    @property
    def uuid(self) -> str | None: ...


G = TypeVar("G", bound=_Numbered)


def names_mig(setting: str | None) -> bool:
    """Does CUDA_VISIBLE_DEVICES name an instance of a GPU that is partitioned, rather than GPUs?"""
    return any(entry.strip().startswith("MIG-") for entry in (setting or "").split(","))


def visible(gpus: tuple[G, ...], setting: str | None) -> tuple[G, ...]:
    """Those that CUDA_VISIBLE_DEVICES leaves, in its order. CUDA stops at the first entry that it does not know. MIG
    instances are none of these.

    Numbers are taken in the driver's order; CUDA's own default (fastest first) differs only on unlike GPUs.
    """
    if setting is None:
        return gpus
    found: list[G] = []
    for entry in (part.strip() for part in setting.split(",")):
        matches = [g for g in gpus if entry and (entry == str(g.index) or (g.uuid or "").startswith(entry))]
        if len(matches) != 1 or matches[0] in found:
            break
        found.append(matches[0])
    return tuple(found)
