"""What a process and its GPUs use right now: cheap enough to be read once a second beside a running script.

A Sensors is opened once, because per cent of a CPU means 'since the last reading', and starting NVML costs
milliseconds. A reading takes well under a millisecond and never wakes CUDA.

>>> with Sensors() as sensors:
...     sensors.read().process_resident_bytes > 0
True
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any

import psutil
import pynvml

from flatout.machine.cgroup import read_cgroup
from flatout.machine.device import CpuDevice


@dataclass(frozen=True, kw_only=True)
class GpuReading:
    """One GPU; None: the driver does not tell."""

    index: int
    busy_share: float | None  # of the last fraction of a second in which any kernel ran
    memory_used_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One moment."""

    process_resident_bytes: int
    process_peak_bytes: int | None
    process_cpu_share: float  # of one core since the last reading: 2.0 is two busy cores
    machine_cpu_share: float  # of all cores since the last reading, 0..1, everybody's work
    cgroup_used_bytes: int | None
    cgroup_limit_bytes: int | None
    gpus: tuple[GpuReading, ...] = ()


class Sensors:
    """Open handles to the sensors of this process (or of another, by its id)."""

    def __init__(self, pid: int | None = None) -> None:
        self._process = psutil.Process(pid)
        self._own = pid is None
        self._process.cpu_percent()  # the first answer is meaningless
        psutil.cpu_percent()
        self._gpus = _open_gpus()

    def read(self) -> Reading:
        """Now. Raises psutil.NoSuchProcess when another process that is watched has ended."""
        cgroup = read_cgroup()
        return Reading(
            process_resident_bytes=self._process.memory_info().rss,
            process_peak_bytes=CpuDevice().memory_peak_bytes() if self._own else None,
            process_cpu_share=self._process.cpu_percent() / 100,
            machine_cpu_share=psutil.cpu_percent() / 100,
            cgroup_used_bytes=cgroup.memory_used_bytes,
            cgroup_limit_bytes=cgroup.memory_limit_bytes,
            gpus=tuple(_read_gpu(index, handle) for index, handle in self._gpus.items()),
        )

    def close(self) -> None:
        """Let go of the driver."""
        if self._gpus:
            pynvml.nvmlShutdown()
            self._gpus = {}

    def __enter__(self) -> Sensors:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _open_gpus() -> dict[int, Any]:
    try:
        pynvml.nvmlInit()
        return {index: pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())}
    except pynvml.NVMLError:
        return {}


def _read_gpu(index: int, handle: Any) -> GpuReading:
    try:
        busy: float | None = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    except pynvml.NVMLError:
        busy = None
    try:
        used: int | None = int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
    except pynvml.NVMLError:
        used = None
    return GpuReading(index=index, busy_share=busy, memory_used_bytes=used)
