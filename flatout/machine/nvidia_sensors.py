"""Readings of NVIDIA GPUs through NVML: the driver's own sensors, which need no CUDA context and start no GPU work."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import pynvml

from flatout.machine.description import GpuProcess
from flatout.machine.nvidia import listed_processes

T = TypeVar("T")

THROTTLE_REASONS = {
    0x4: "power limit",
    0x8: "hardware slowdown",
    0x20: "temperature",
    0x40: "temperature (hardware)",
    0x80: "power brake",
}
"""Bits of NVML's clock event reasons that hold a working GPU back. Idleness, and clocks that somebody has set, do not
count."""


@dataclass(frozen=True, kw_only=True)
class GpuReading:
    """One GPU at one moment. What the driver refuses is None."""

    clock_seconds: float
    """time.monotonic() of this reading."""
    index: int
    """As the driver counts."""
    name: str
    uuid: str | None = None
    busy_share: float | None = None
    """Share of the driver's last sampling period (up to a second) in which any kernel ran, 0 to 1."""
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    clock_hz: float | None = None
    """Of the multiprocessors."""
    highest_clock_hz: float | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    temperature_celsius: float | None = None
    throttled: tuple[str, ...] | None = None
    """What holds its clock back now; empty: nothing."""
    energy_joules: float | None = None
    """Since the driver was loaded; a counter."""
    processes: tuple[GpuProcess, ...] | None = None
    """None: not asked for, or refused."""
    unknown: Mapping[str, str] = field(default_factory=dict)
    """Field -> why it is None."""


class NvidiaSensors:
    """The driver's library, opened once; `reason` says why there is no GPU to read."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._handles: list[tuple[int, object]] = []
        self._open = False
        try:
            pynvml.nvmlInit()
            self._open = True
            count = pynvml.nvmlDeviceGetCount()
        except pynvml.NVMLError_LibraryNotFound:
            self.reason = "no NVIDIA driver is installed"
            return
        except pynvml.NVMLError as error:
            self.reason = f"the NVIDIA driver does not answer: {error}"
            return
        lost = ""
        for index in range(count):
            try:
                self._handles.append((index, pynvml.nvmlDeviceGetHandleByIndex(index)))
            except pynvml.NVMLError as error:  # one that is lost; the others can be read
                lost = f" that answers: {error}"
        if not self._handles:
            self.reason = f"the NVIDIA driver lists no GPU{lost}"

    def read(self, *, processes: bool = False) -> tuple[GpuReading, ...]:
        return tuple(_read(index, handle, processes) for index, handle in self._handles)

    def close(self) -> None:
        if self._open:
            self._open, self._handles = False, []
            pynvml.nvmlShutdown()


def _read(index: int, handle: object, processes: bool) -> GpuReading:
    unknown: dict[str, str] = {}

    def ask(names: str, query: Callable[[], T]) -> T | None:
        try:
            return query()
        except pynvml.NVMLError as error:
            unknown.update(dict.fromkeys(names.split(), str(error)))
            return None

    name = ask("name", lambda: str(pynvml.nvmlDeviceGetName(handle)))
    memory = ask("memory_used_bytes memory_total_bytes", lambda: pynvml.nvmlDeviceGetMemoryInfo(handle))
    reasons = ask("throttled", lambda: int(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)))
    clock = pynvml.NVML_CLOCK_SM
    return GpuReading(
        clock_seconds=time.monotonic(),
        index=index,
        name=name or "unnamed NVIDIA GPU",
        uuid=ask("uuid", lambda: str(pynvml.nvmlDeviceGetUUID(handle))),
        busy_share=ask("busy_share", lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100),
        memory_used_bytes=None if memory is None else int(memory.used),
        memory_total_bytes=None if memory is None else int(memory.total),
        clock_hz=ask("clock_hz", lambda: pynvml.nvmlDeviceGetClockInfo(handle, clock) * 1e6),
        highest_clock_hz=ask("highest_clock_hz", lambda: pynvml.nvmlDeviceGetMaxClockInfo(handle, clock) * 1e6),
        power_watts=ask("power_watts", lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3),
        power_limit_watts=ask("power_limit_watts", lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3),
        temperature_celsius=ask(
            "temperature_celsius",
            lambda: float(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)),
        ),
        throttled=None if reasons is None else tuple(why for bit, why in THROTTLE_REASONS.items() if reasons & bit),
        energy_joules=ask("energy_joules", lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3),
        processes=_processes(handle, ask) if processes else None,
        unknown=unknown,
    )


def _processes(
    handle: object, ask: Callable[[str, Callable[[], tuple[GpuProcess, ...]]], tuple[GpuProcess, ...] | None]
) -> tuple[GpuProcess, ...] | None:
    return ask("processes", lambda: listed_processes(pynvml.nvmlDeviceGetComputeRunningProcesses(handle)))
