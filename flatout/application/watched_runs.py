"""One run or all runs of this user on this machine, read from outside: nothing of theirs is changed."""

from __future__ import annotations

import time
from pathlib import Path

from flatout.diagnose.run_energy import EnergyWatch
from flatout.diagnose.seen_run import Watched
from flatout.machine.ceilings import Ceilings
from flatout.machine.detect import detect
from flatout.machine.device_rates import DeviceWatch
from flatout.machine.kept_ceilings import load_ceilings
from flatout.machine.processes import processes_below
from flatout.machine.sensors import Sensors, SensorSource
from flatout.serve.run_folder import all_runs, find_run, read_ranks, read_run, runs_unknown_because


class RunWatch:
    """name: a process or a folder, or None for all runs. Raises UsageError where there is no such run."""

    def __init__(self, name: str | None, *, sensors: SensorSource | None = None) -> None:
        self._folder = None if name is None else Path(find_run(name).folder)
        self._devices, self._energy = DeviceWatch(sensors or Sensors()), EnergyWatch()
        self._ceilings: dict[str, Ceilings | None] = {}

    def read(self) -> Watched:
        devices = self._devices.read(processes=True)
        now = time.monotonic()
        if self._folder is None:
            unknown = runs_unknown_because()
            return Watched(runs=tuple(all_runs()), runs_unknown_because=unknown, devices=devices, clock_seconds=now)
        seen = read_run(self._folder)
        return Watched(
            runs=(seen,),
            devices=devices,
            clock_seconds=now,
            single=True,
            processes=processes_below(seen.state.pid) if seen.condition in ("running", "stopped") else (),
            energy=self._energy.add(seen.state, devices) if seen.condition == "running" else None,
            ceilings=self._ceilings_of(seen.state.device),
            ranks=read_ranks(seen),
        )

    def close(self) -> None:
        self._devices.close()

    def _ceilings_of(self, device: str | None) -> Ceilings | None:
        if device is not None and device not in self._ceilings:
            self._ceilings[device] = load_ceilings(detect(), device)
        return None if device is None else self._ceilings[device]
