"""What `flatout watch` finds: runs, and the devices of this machine."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from flatout.diagnose.live_ranks import LiveRanks
from flatout.diagnose.run_energy import Energy
from flatout.diagnose.seen_run import SeenRun
from flatout.machine.ceilings import Ceilings
from flatout.machine.device_rates import Devices
from flatout.machine.processes import ProcessUse


@dataclass(frozen=True, kw_only=True)
class Watched:
    """At one moment. single: one run was asked for, and `energy` and `ceilings` are of it."""

    runs: tuple[SeenRun, ...]
    runs_unknown_because: str | None = None
    """Why runs may be missing among these."""
    devices: Devices
    clock_seconds: float
    """time.monotonic() then."""
    single: bool = False
    processes: tuple[ProcessUse, ...] = ()
    """Below the run that was asked for: loader workers, for example."""
    ranks: LiveRanks = field(default_factory=LiveRanks)
    """Of it, where several processes train."""
    energy: Energy | None = None
    ceilings: Ceilings | None = None

    @property
    def over(self) -> bool:
        """Has the run that was asked for ended?"""
        return self.single and self.runs[0].condition in ("ended", "killed")

    def to_json(self) -> dict[str, object]:
        return {
            "runs": [one.to_json() for one in self.runs],
            "runs_unknown_because": self.runs_unknown_because,
            "devices": self.devices.to_json(),
            "ranks": self.ranks.to_json(),
            "processes": [asdict(one) for one in self.processes],
            "energy": None if self.energy is None else self.energy.to_json(),
        }
