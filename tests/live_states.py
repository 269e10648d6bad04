"""A state of a run, to be changed field by field, and readings of sensors."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from flatout.diagnose.finding import Finding
from flatout.diagnose.run_state import RunState
from flatout.machine.nvidia_sensors import GpuReading
from flatout.machine.processes import pid_namespace, process_started
from flatout.machine.sensors import CpuReading, Reading
from flatout.script.epochs import Epoch

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\x1b]0;owned\x07.py"
"""The name of a script."""
FINDING = Finding(
    name="starved-loader",
    severity="note",
    title="the model waits for data: 34% of a step",
    evidence="4 ms of 12 ms a step",
    remedy="set num_workers=2 on the loader",
    next_command="flatout tune train.py ARGUMENTS",
)


def run_state(**changes: Any) -> RunState:
    """Of this process, on the CPU, at its 1,234th step."""
    usual: dict[str, Any] = {
        "pid": os.getpid(),
        "process_started": process_started(os.getpid()),
        "pid_namespace": pid_namespace(),
        "script": "train.py",
        "started_at": 1_790_000_000.0,
        "written_at": 1_790_000_100.0,
        "written_clock": 1100.0,
        "run_seconds": 100.0,
        "device": "cpu",
        "steps": 1234,
        "step_seconds": 0.0125,
        "last_step_clock": 1100.0,
        "parts_seconds": {"data": 0.004, "forward": 0.003, "backward": 0.004, "optimizer": 0.001, "other": 0.0005},
        "parts_step_seconds": 0.0125,
        "epoch": Epoch(number=3, steps_done=120, steps_total=500, seconds=1.5),
        "samples_per_step": 32,
        "flops_per_step": 1e9,
        "resident_bytes": 1 << 30,
        "cpu_seconds": 190.0,
        "step_curve": (0.012, 0.013, 0.0125),
        "memory_curve": (1 << 29, 1 << 30),
    }
    return RunState(**(usual | changes))


def cpu_reading(clock_seconds: float = 0.0, **changes: Any) -> CpuReading:
    return replace(CpuReading(clock_seconds=clock_seconds), **changes)


def gpu_reading(clock_seconds: float = 0.0, **changes: Any) -> GpuReading:
    usual: dict[str, Any] = {
        "index": 0,
        "name": "NVIDIA H100 80GB HBM3",
        "uuid": "GPU-1",
        "busy_share": 0.98,
        "memory_used_bytes": 8 << 30,
        "memory_total_bytes": 80 << 30,
        "clock_hz": 1.755e9,
        "highest_clock_hz": 1.98e9,
        "power_watts": 612.4,
        "power_limit_watts": 700.0,
        "temperature_celsius": 61.0,
        "throttled": (),
        "energy_joules": 600.0 * clock_seconds,
    }
    return GpuReading(clock_seconds=clock_seconds, **(usual | changes))


def reading(clock_seconds: float = 0.0, *gpus: GpuReading, **changes: Any) -> Reading:
    why = None if gpus else "no NVIDIA driver is installed"
    return Reading(cpu=cpu_reading(clock_seconds, **changes), gpus=gpus, no_gpu_because=why)
