"""What the machine's sensors say while something runs: use, clocks, power, temperature, throttling, energy.

    sensors = Sensors()                  # opens the NVIDIA driver's library; creates no CUDA context
    before, after = sensors.read(), sensors.read()
    watts = power_between(before.gpus[0], after.gpus[0])

Energy is read as counters that only rise: the difference of two readings is exact, where samples of power miss peaks.
Whatever a machine does not report is None, and `unknown` says why.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

from flatout.decoding import decode
from flatout.machine.detect import memory_left
from flatout.machine.nvidia_sensors import GpuReading, NvidiaSensors

MOST_CLOCKS_READ = 8
"""Cores whose clock is read: each costs a system call, and a reading must stay cheap on 200 cores."""
TEMPERATURE_CHIPS = ("coretemp", "k10temp", "zenpower", "cpu_thermal")
"""Names of the kernel's drivers for temperatures inside a processor."""
NO_SENSOR = "this system shows no such sensor (usual in virtual machines and containers)"


@dataclass(frozen=True, kw_only=True)
class CpuReading:
    """The whole machine's processors at one moment, not one process's share of them."""

    clock_seconds: float
    """time.monotonic() of this reading."""
    busy_seconds: float | None = None
    """Time that all cores together have worked since the machine started; a counter."""
    idle_seconds: float | None = None
    frequency_hz: float | None = None
    """Mean over the cores that were read."""
    temperature_celsius: float | None = None
    """Of the hottest sensor inside a processor."""
    throttle_events: int | None = None
    """How often a processor slowed down because it was hot; a counter."""
    energy_joules: float | None = None
    """Of all processor packages; a counter that starts anywhere."""
    energy_wraps_joules: float | None = None
    """Where that counter starts again at 0; None with several packages, whose counters do so one by one."""
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    unknown: Mapping[str, str] = field(default_factory=dict)
    """Field -> why it is None."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """All sensors at one moment."""

    cpu: CpuReading
    gpus: tuple[GpuReading, ...] = ()
    no_gpu_because: str | None = None

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: object) -> Reading:
        return decode(cls, data)


class SensorSource(Protocol):
    """Sensors, or a recording of them."""

    def read(self, *, processes: bool = False) -> Reading:
        """What they say now. processes: also which processes use each GPU."""

    def close(self) -> None:
        """Release what is held."""


class Sensors:
    """This machine's. Which files there are is looked up once, so that a reading takes well under a millisecond."""

    def __init__(self) -> None:
        self._cpu = CpuSensors()
        self._gpus = NvidiaSensors()

    def read(self, *, processes: bool = False) -> Reading:
        cpu = self._cpu.read()
        return Reading(cpu=cpu, gpus=self._gpus.read(processes=processes), no_gpu_because=self._gpus.reason)

    def close(self) -> None:
        self._gpus.close()


class CpuSensors:
    """What Linux shows of the processors below /sys and /proc."""

    def __init__(self, root: Path = Path("/")) -> None:
        """root: where /sys and /proc are."""
        self._stat = root / "proc" / "stat"
        cpus = root / "sys" / "devices" / "system" / "cpu"
        clocks = [cpus / f"cpu{number}" / "cpufreq" / "scaling_cur_freq" for number in _some_cores()]
        self._clocks = [path for path in clocks if os.path.exists(path)]  # False also where it may not be asked
        self._throttled = cpus / "cpu0" / "thermal_throttle" / "package_throttle_count"
        self._temperatures = list(_temperature_files(root / "sys" / "class" / "hwmon"))
        self._packages = list(_package_folders(root / "sys" / "class" / "powercap"))

    def read(self) -> CpuReading:
        unknown: dict[str, str] = {}

        def known(name: str, read: Callable[[], float | None]) -> float | None:
            try:
                value = read()
            except PermissionError:
                value, unknown[name] = None, "only root may read it on this system"
            except (OSError, ValueError):
                value = None
            if value is None:
                unknown.setdefault(name, NO_SENSOR)
            return value

        throttled = known("throttle_events", lambda: _number(self._throttled))
        busy, idle = _busy_and_idle(self._stat)
        if busy is None:
            unknown["busy_seconds"] = unknown["idle_seconds"] = "there is no /proc/stat here"
        left, total = _memory_left()
        if total is None:
            unknown["memory_used_bytes"] = unknown["memory_total_bytes"] = "the system does not report it"
        return CpuReading(
            clock_seconds=time.monotonic(),
            busy_seconds=busy,
            idle_seconds=idle,
            frequency_hz=known("frequency_hz", lambda: _mean([_number(path) * 1e3 for path in self._clocks])),
            temperature_celsius=known(
                "temperature_celsius", lambda: max((_number(path) / 1e3 for path in self._temperatures), default=None)
            ),
            throttle_events=None if throttled is None else int(throttled),
            energy_joules=known("energy_joules", self._energy_joules),
            energy_wraps_joules=known("energy_wraps_joules", self._wraps_joules),
            memory_used_bytes=None if total is None or left is None else total - left,
            memory_total_bytes=total,
            unknown=unknown,
        )

    def _energy_joules(self) -> float | None:
        return sum(_number(folder / "energy_uj") / 1e6 for folder in self._packages) if self._packages else None

    def _wraps_joules(self) -> float | None:
        """None with several packages: their counters start again one by one, and a sum does not show which did."""
        return _number(self._packages[0] / "max_energy_range_uj") / 1e6 if len(self._packages) == 1 else None


def power_between(before: CpuReading | GpuReading, after: CpuReading | GpuReading) -> float | None:
    """Mean watts between two readings of one device, from its energy counter; None where it has none."""
    seconds = after.clock_seconds - before.clock_seconds
    if before.energy_joules is None or after.energy_joules is None or seconds <= 0:
        return None
    joules = after.energy_joules - before.energy_joules
    if joules < 0 and isinstance(after, CpuReading) and after.energy_wraps_joules is not None:
        joules += after.energy_wraps_joules
    return joules / seconds if joules >= 0 else None


def busy_share_between(before: CpuReading, after: CpuReading) -> float | None:
    """The share of all cores' time that was used, 0 to 1."""
    if None in (before.busy_seconds, before.idle_seconds, after.busy_seconds, after.idle_seconds):
        return None
    busy = (after.busy_seconds or 0.0) - (before.busy_seconds or 0.0)
    idle = (after.idle_seconds or 0.0) - (before.idle_seconds or 0.0)
    return busy / (busy + idle) if busy >= 0 and idle >= 0 and busy + idle > 0 else None


def _some_cores() -> list[int]:
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    return cores[:: max(1, -(-len(cores) // MOST_CLOCKS_READ))]


def _temperature_files(folder: Path) -> Iterator[Path]:
    for chip, name in _named_entries(folder):
        if name in TEMPERATURE_CHIPS:
            yield from (
                path for path in _entries(chip) if path.name.startswith("temp") and path.name.endswith("_input")
            )


def _package_folders(folder: Path) -> Iterator[Path]:
    """One for each package: 'intel-rapl:0', also on AMD's processors; those with two colons are parts of it."""
    for path, name in _named_entries(folder):
        if path.name.startswith("intel-rapl:") and name.startswith("package"):
            yield path


def _named_entries(folder: Path) -> Iterator[tuple[Path, str]]:
    """With what their file `name` says."""
    for path in _entries(folder):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            yield path, (path / "name").read_text().strip()


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _number(path: Path) -> float:
    with open(path, "rb", buffering=0) as file:
        return float(file.read(64))


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _busy_and_idle(path: Path) -> tuple[float | None, float | None]:
    """From the line 'cpu  user nice system idle iowait irq softirq steal ...', in ticks of all cores."""
    try:
        with open(path, "rb", buffering=0) as file:
            words = file.read(256).split(b"\n")[0].split()
        ticks = [int(word) for word in words[1:9]]
    except (OSError, ValueError):
        return None, None
    if len(ticks) < 8:
        return None, None
    second = os.sysconf("SC_CLK_TCK")
    idle = ticks[3] + ticks[4]
    return (sum(ticks) - idle) / second, idle / second


def _memory_left() -> tuple[int | None, int | None]:
    try:
        return memory_left()
    except (OSError, KeyError, ValueError):
        return None, None
