"""Rates of devices, from two readings of their sensors some seconds apart."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass

from flatout.machine.sensors import Reading, SensorSource, busy_share_between, power_between

LONGEST_SECONDS = 10.0
"""Rates are means over about this long: single seconds vary too much to be read."""


@dataclass(frozen=True, kw_only=True)
class Devices:
    """The latest reading, and what it says together with an earlier one. None: unknown, or there is only one yet."""

    reading: Reading
    seconds: float
    """Between the two readings."""
    cpu_busy_share: float | None = None
    """Of all cores, by all processes."""
    cpu_watts: float | None = None
    """Of all processor packages."""
    cpu_throttled: bool | None = None
    """Did a processor slow down because it was hot?"""
    gpu_watts: tuple[float | None, ...] = ()
    """From the energy counter of each GPU, in the order of the reading."""

    def to_json(self) -> dict[str, object]:
        return asdict(self)


class DeviceWatch:
    """Reads sensors now and then, and keeps what rates need."""

    def __init__(self, source: SensorSource) -> None:
        self._source = source
        self._readings: deque[Reading] = deque()

    def read(self, *, processes: bool = False) -> Devices:
        now = self._source.read(processes=processes)
        self._readings.append(now)
        while len(self._readings) > 2 and now.cpu.clock_seconds - self._readings[1].cpu.clock_seconds > LONGEST_SECONDS:
            self._readings.popleft()
        then = self._readings[0]
        same = [gpu.index for gpu in then.gpus] == [gpu.index for gpu in now.gpus]
        events = then.cpu.throttle_events, now.cpu.throttle_events
        return Devices(
            reading=now,
            seconds=now.cpu.clock_seconds - then.cpu.clock_seconds,
            cpu_busy_share=busy_share_between(then.cpu, now.cpu),
            cpu_watts=power_between(then.cpu, now.cpu),
            cpu_throttled=None if events[0] is None or events[1] is None or then is now else events[1] > events[0],
            gpu_watts=tuple(map(power_between, then.gpus, now.gpus)) if same else (None,) * len(now.gpus),
        )

    def close(self) -> None:
        self._source.close()
