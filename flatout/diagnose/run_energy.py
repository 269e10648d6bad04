"""What a step and a sample cost in energy: of the whole device that trains, over the last seconds of a run.

Only where both are measured: the device's energy counter, and the steps between two states of the run. The counter
does not know who used the device, so other processes' work is in it too.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass

from flatout.diagnose.run_state import RunState
from flatout.machine.device_rates import LONGEST_SECONDS, Devices
from flatout.machine.nvidia import visible
from flatout.machine.nvidia_sensors import GpuReading

LEAST_SECONDS = 2.0
TOO_EARLY = "the run was not watched for long enough yet"


@dataclass(frozen=True, kw_only=True)
class Energy:
    """None: unknown, and why."""

    of_what: str
    """'GPU 0', 'the processor'."""
    joules_per_step: float | None = None
    joules_per_sample: float | None = None
    unknown_because: str = ""

    def to_json(self) -> dict[str, object]:
        return asdict(self)


class EnergyWatch:
    """Give it each new state of one run with the devices as they are then."""

    def __init__(self) -> None:
        self._states: deque[RunState] = deque()

    def add(self, state: RunState, devices: Devices) -> Energy:
        if not self._states or state.written_clock > self._states[-1].written_clock:
            self._states.append(state)
        while len(self._states) > 2 and state.written_clock - self._states[1].written_clock > LONGEST_SECONDS:
            self._states.popleft()
        return energy_of(self._states[0], self._states[-1], devices)


def energy_of(before: RunState, after: RunState, devices: Devices) -> Energy:
    """From the steps between two states, and the power of the device meanwhile."""
    of_what, watts, why = _power(after, devices)
    if watts is None:
        return Energy(of_what=of_what, unknown_because=why)
    seconds, steps = after.written_clock - before.written_clock, after.steps - before.steps
    if steps < 1 or min(seconds, devices.seconds) < LEAST_SECONDS:
        return Energy(of_what=of_what, unknown_because=TOO_EARLY)
    joules = watts * seconds / steps
    samples = after.samples_per_step
    return Energy(
        of_what=of_what,
        joules_per_step=joules,
        joules_per_sample=joules / samples if samples else None,
        unknown_because="" if samples else after.samples_unknown_because,
    )


def trained_on(state: RunState, gpus: tuple[GpuReading, ...]) -> GpuReading | None:
    """The GPU that trains; None for the CPU, or where it is not among these."""
    if state.device is None or not state.device.startswith("cuda"):
        return None
    shown, index = visible(gpus, state.visible_devices), int(state.device.partition(":")[2] or 0)
    return shown[index] if index < len(shown) else None


def _power(state: RunState, devices: Devices) -> tuple[str, float | None, str]:
    """(of what, watts, why they are not known)"""
    reading = devices.reading
    if state.device is None:
        return "the device", None, "no step was seen yet"
    if state.device.startswith("cpu"):
        why = reading.cpu.unknown.get("energy_joules", TOO_EARLY)
        return "the processor", devices.cpu_watts, why
    gpu = trained_on(state, reading.gpus)
    if gpu is None:
        return state.device, None, reading.no_gpu_because or "the driver does not list it"
    watts = devices.gpu_watts[reading.gpus.index(gpu)]
    return f"GPU {gpu.index}", watts, gpu.unknown.get("energy_joules", TOO_EARLY)
