"""Sensors from a recorded /sys and /proc, from stand-ins for NVML's functions, and from recorded readings."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from flatout.machine import nvidia_sensors
from flatout.machine.device_rates import DeviceWatch
from flatout.machine.sensors import (
    NO_SENSOR,
    CpuSensors,
    Reading,
    Sensors,
    busy_share_between,
    power_between,
)
from tests.live_states import cpu_reading, gpu_reading, reading

RECORDED = Path(__file__).parents[1] / "recorded" / "sensors.json"
CORE = min(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0


class ReplayedSensors:
    """Readings from a file, a JSON list of them, in their order; the last one stays."""

    def __init__(self, path: Path) -> None:
        self._readings = [Reading.from_json(one) for one in json.loads(path.read_text(encoding="utf-8"))]

    def read(self, *, processes: bool = False) -> Reading:
        return self._readings.pop(0) if len(self._readings) > 1 else self._readings[0]

    def close(self) -> None:
        """Nothing is held."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The files of a machine with two packages, two chips and one core."""
    files = {
        "proc/stat": "cpu  1000 0 500 7000 500 0 0 0 0 0\ncpu0 1 2 3\n",
        f"sys/devices/system/cpu/cpu{CORE}/cpufreq/scaling_cur_freq": "2600000\n",
        "sys/devices/system/cpu/cpu0/thermal_throttle/package_throttle_count": "3\n",
        "sys/class/hwmon/hwmon0/name": "nvme\n",
        "sys/class/hwmon/hwmon0/temp1_input": "90000\n",
        "sys/class/hwmon/hwmon1/name": "coretemp\n",
        "sys/class/hwmon/hwmon1/temp1_input": "58000\n",
        "sys/class/hwmon/hwmon1/temp2_input": "61500\n",
        "sys/class/hwmon/hwmon1/temp2_label": "Core 0\n",
        "sys/class/powercap/intel-rapl:0/name": "package-0\n",
        "sys/class/powercap/intel-rapl:0/energy_uj": "5000000\n",
        "sys/class/powercap/intel-rapl:0/max_energy_range_uj": "262143328850\n",
        "sys/class/powercap/intel-rapl:0:0/name": "core\n",
        "sys/class/powercap/intel-rapl:0:0/energy_uj": "4000000\n",
        "sys/class/powercap/intel-rapl:1/name": "package-1\n",
        "sys/class/powercap/intel-rapl:1/energy_uj": "7000000\n",
        "sys/class/powercap/intel-rapl:1/max_energy_range_uj": "262143328850\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_what_linux_shows(root: Path) -> None:
    found = CpuSensors(root).read()
    assert (found.frequency_hz, found.temperature_celsius, found.throttle_events) == (2.6e9, 61.5, 3)
    assert (found.energy_joules, found.energy_wraps_joules) == (12.0, None)
    ticks = os.sysconf("SC_CLK_TCK")
    assert (found.busy_seconds, found.idle_seconds) == (1500 / ticks, 7500 / ticks)
    assert set(found.unknown) == {"energy_wraps_joules"}
    shutil.rmtree(root / "sys/class/powercap/intel-rapl:1")
    alone = CpuSensors(root).read()
    assert (alone.energy_joules, alone.energy_wraps_joules) == (5.0, pytest.approx(262143.32885))


def test_what_is_not_there_is_unknown_and_says_why(tmp_path: Path) -> None:
    found = CpuSensors(tmp_path).read()
    assert (found.frequency_hz, found.temperature_celsius, found.energy_joules) == (None, None, None)
    assert found.unknown["temperature_celsius"] == NO_SENSOR
    assert found.unknown["busy_seconds"] == "there is no /proc/stat here"


def test_energy_that_only_root_may_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = open

    def guarded(path: Any, *words: Any, **named: Any) -> Any:
        if str(path).endswith("energy_uj"):
            raise PermissionError(13, "Permission denied")
        return usual(path, *words, **named)

    monkeypatch.setattr("builtins.open", guarded)
    found = CpuSensors(root).read()
    assert found.energy_joules is None
    assert found.unknown["energy_joules"] == "only root may read it on this system"
    assert found.temperature_celsius == 61.5


def test_a_sensor_that_says_nonsense_is_unknown(root: Path) -> None:
    (root / "sys/class/hwmon/hwmon1/temp1_input").write_text("hot")
    assert CpuSensors(root).read().temperature_celsius is None


def test_this_machine_can_be_read() -> None:
    sensors = Sensors()
    found = sensors.read(processes=True)
    sensors.close()
    sensors.close()
    assert Reading.from_json(json.loads(json.dumps(found.to_json()))) == found
    assert found.gpus or found.no_gpu_because


def test_power_is_the_difference_of_energy() -> None:
    before, after = gpu_reading(10.0, energy_joules=100.0), gpu_reading(12.0, energy_joules=900.0)
    assert power_between(before, after) == 400.0
    assert power_between(after, before) is None
    assert power_between(before, before) is None
    assert power_between(before, gpu_reading(12.0, energy_joules=None)) is None
    assert power_between(after, gpu_reading(14.0, energy_joules=1.0)) is None  # the driver was loaded anew


def test_a_counter_that_starts_again_at_zero() -> None:
    before = cpu_reading(0.0, energy_joules=990.0, energy_wraps_joules=1000.0)
    after = cpu_reading(1.0, energy_joules=40.0, energy_wraps_joules=1000.0)
    assert power_between(before, after) == 50.0
    assert power_between(before, replace(after, energy_wraps_joules=None)) is None


def test_shares_of_cores() -> None:
    before, after = (
        cpu_reading(0, busy_seconds=10, idle_seconds=10),
        cpu_reading(1, busy_seconds=11.5, idle_seconds=10.5),
    )
    assert busy_share_between(before, after) == 0.75
    assert busy_share_between(before, before) is None
    assert busy_share_between(after, before) is None
    assert busy_share_between(before, cpu_reading(1)) is None


def test_recorded_readings_are_replayed_with_their_rates() -> None:
    watch = DeviceWatch(ReplayedSensors(RECORDED))
    first, second, third = watch.read(), watch.read(), watch.read()
    assert (first.gpu_watts, first.cpu_busy_share, first.cpu_throttled) == ((None,), None, None)
    assert second.gpu_watts == (pytest.approx(610.0),)
    assert second.cpu_busy_share == pytest.approx(0.75)
    assert second.cpu_throttled is True
    assert second.reading.gpus[0].throttled == ("power limit",)
    assert third.reading == second.reading  # the last one stays
    watch.close()


def test_rates_are_of_the_last_seconds() -> None:
    class Source:
        clock = 0.0

        def read(self, *, processes: bool = False) -> Reading:
            self.clock += 4.0
            return reading(self.clock, gpu_reading(self.clock, energy_joules=self.clock**2))

        def close(self) -> None: ...

    watch = DeviceWatch(Source())
    found = [watch.read() for _ in range(6)][-1]
    assert found.seconds == 12.0
    assert found.gpu_watts == (pytest.approx((24**2 - 12**2) / 12),)


# NVML


def refuse(*_: Any) -> Any:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def play(**answers: Callable[..., Any]) -> None:
        usual: dict[str, Callable[..., Any]] = {
            "Init": lambda: None,
            "Shutdown": lambda: None,
            "DeviceGetCount": lambda: 1,
            "DeviceGetHandleByIndex": lambda index: index,
            "DeviceGetName": lambda handle: "NVIDIA H200",
            "DeviceGetUUID": lambda handle: "GPU-1",
            "DeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=100, free=60, used=40),
            "DeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=73),
            "DeviceGetClockInfo": lambda handle, clock: 1755,
            "DeviceGetMaxClockInfo": lambda handle, clock: 1980,
            "DeviceGetPowerUsage": lambda handle: 612400,
            "DeviceGetEnforcedPowerLimit": lambda handle: 700000,
            "DeviceGetTemperature": lambda handle, sensor: 61,
            "DeviceGetCurrentClocksThrottleReasons": lambda handle: 0x1 | 0x4 | 0x20,
            "DeviceGetTotalEnergyConsumption": lambda handle: 123456,
            "DeviceGetComputeRunningProcesses": lambda handle: [SimpleNamespace(pid=2**22 + 1, usedGpuMemory=7)],
        }
        for name, answer in (usual | answers).items():
            monkeypatch.setattr(pynvml, f"nvml{name}", answer)

    return play


def test_a_gpu_is_read(play: Callable[..., None]) -> None:
    play()
    (gpu,) = nvidia_sensors.NvidiaSensors().read(processes=True)
    assert (gpu.name, gpu.busy_share, gpu.memory_used_bytes, gpu.memory_total_bytes) == ("NVIDIA H200", 0.73, 40, 100)
    assert (gpu.clock_hz, gpu.highest_clock_hz) == (1.755e9, 1.98e9)
    assert (gpu.power_watts, gpu.power_limit_watts, gpu.energy_joules) == (612.4, 700.0, 123.456)
    assert (gpu.temperature_celsius, gpu.throttled) == (61.0, ("power limit", "temperature"))
    assert [(one.pid, one.memory_bytes) for one in gpu.processes or ()] == [(2**22 + 1, 7)]
    assert gpu.unknown == {}


def test_what_a_driver_refuses_is_unknown_and_says_why(play: Callable[..., None]) -> None:
    names = ["UtilizationRates", "PowerUsage", "TotalEnergyConsumption", "CurrentClocksThrottleReasons", "MemoryInfo"]
    play(**{f"DeviceGet{name}": refuse for name in names})
    (gpu,) = nvidia_sensors.NvidiaSensors().read()
    assert (gpu.busy_share, gpu.power_watts, gpu.energy_joules, gpu.throttled, gpu.processes) == (None,) * 5
    assert gpu.unknown["energy_joules"] == "Not Supported"
    assert gpu.unknown["memory_total_bytes"] == "Not Supported"
    assert gpu.temperature_celsius == 61.0


def test_a_gpu_that_is_lost_hides_no_other(play: Callable[..., None]) -> None:
    def handle(index: int) -> int:
        if index == 0:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return index

    play(DeviceGetCount=lambda: 3, DeviceGetHandleByIndex=handle)
    sensors = nvidia_sensors.NvidiaSensors()
    assert [gpu.index for gpu in sensors.read()] == [1, 2]
    assert sensors.reason is None
    play(DeviceGetCount=lambda: 1, DeviceGetHandleByIndex=handle)
    assert "lists no GPU that answers: GPU is lost" in (nvidia_sensors.NvidiaSensors().reason or "")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "no NVIDIA driver is installed"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "the NVIDIA driver does not answer: RM has detected"),
    ],
)
def test_no_driver_is_an_answer(play: Callable[..., None], code: int, reason: str) -> None:
    def init() -> None:
        raise pynvml.NVMLError(code)

    play(Init=init)
    sensors = nvidia_sensors.NvidiaSensors()
    assert sensors.read() == ()
    assert (sensors.reason or "").startswith(reason)
