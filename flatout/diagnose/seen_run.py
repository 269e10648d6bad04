"""Runs and their ranks as another process sees them: the last state of each, whether it still goes on, and whom the
other ranks wait for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal, Protocol

from flatout.diagnose.run_energy import Energy
from flatout.diagnose.run_state import RunState
from flatout.machine.ceilings import Ceilings
from flatout.machine.device_rates import Devices
from flatout.machine.processes import ProcessUse, pid_namespace, process_condition
from flatout.script.process_record import ProcessRecord, in_order, process_names
from flatout.script.rank_balance import RankBalance, rank_balance
from flatout.script.record_file import WRITE_EVERY_SECONDS

Condition = Literal["running", "stopped", "ended", "killed", "unknown"]
"""stopped: by Ctrl-Z or a debugger. killed: its process is gone and never said that it ended. unknown: its process
cannot be seen from here."""


@dataclass(frozen=True, kw_only=True)
class SeenRun:
    """One run and where it keeps its state."""

    folder: str
    state: RunState
    condition: Condition

    def to_json(self) -> dict[str, object]:
        return {"folder": self.folder, "condition": self.condition, "state": self.state.to_json()}


class Written(Protocol):
    """What a process has written of itself: the state of a run, or the record of a rank."""

    @property
    def ended(self) -> object: ...

    @property
    def pid(self) -> int: ...

    @property
    def pid_namespace(self) -> str | None: ...

    @property
    def process_started(self) -> str | None: ...


def condition_of(state: Written) -> Condition:
    """Of the process that wrote this."""
    if state.ended:
        return "ended"
    if state.pid_namespace != pid_namespace():
        return "unknown"
    found = process_condition(state.pid, state.process_started)
    if found == "gone":
        return "killed"
    return "stopped" if found == "stopped" else "running"


# ranks

LATE_STEPS, LATE_SECONDS = 10.0, 5.0
"""A step is late after this many usual ones, and this long: then it is said when the last one ended."""


@dataclass(frozen=True, kw_only=True)
class LiveRank:
    """One process that trains."""

    name: str
    record: ProcessRecord
    condition: Condition
    silent_seconds: float | None = None
    """Since its last step, where that is unusually long ago."""
    holds_up_seconds: float | None = None
    """Of a step, which the others wait for it; None: they do not, or it is not known."""


@dataclass(frozen=True, kw_only=True)
class LiveRanks:
    """In their order."""

    ranks: tuple[LiveRank, ...] = ()
    balance: RankBalance | None = None

    def __bool__(self) -> bool:
        return bool(self.ranks)

    def to_json(self) -> list[dict[str, object]]:
        return [{**vars(one), "record": one.record.to_json()} for one in self.ranks]


def live_ranks(records: Sequence[ProcessRecord], clock_seconds: float) -> LiveRanks:
    """clock_seconds: time.monotonic() now. Of processes that had the same rank one after the other, the last."""
    newest = in_order(_newest(records))
    balance = rank_balance(newest)
    straggler = balance.straggler if balance is not None and balance.certain else None
    ranks = []
    for name, one in zip(process_names(newest), newest, strict=True):
        condition = condition_of(one)
        # A rank writes its record at the end of a step.
        silent = late_seconds(one, clock_seconds, LATE_SECONDS + WRITE_EVERY_SECONDS)
        ranks.append(
            LiveRank(
                name=name,
                record=one,
                condition=condition,
                silent_seconds=silent if condition in ("running", "unknown") else None,
                holds_up_seconds=balance.excess_seconds if balance is not None and name == straggler else None,
            )
        )
    return LiveRanks(ranks=tuple(ranks), balance=balance)


def _newest(records: Sequence[ProcessRecord]) -> list[ProcessRecord]:
    found: dict[object, ProcessRecord] = {}
    for one in sorted(records, key=lambda one: one.started_at):
        found[one.rank if one.rank is not None else (one.pid, one.started_at)] = one
    return list(found.values())


def late_seconds(one: RunState | ProcessRecord, clock_seconds: float, least: float = LATE_SECONDS) -> float | None:
    """Since its last step, where that is unusually long ago."""
    if one.last_step_clock is None:
        return None
    ago = clock_seconds - one.last_step_clock
    return ago if ago > max(least, LATE_STEPS * (one.step_seconds or 0.0)) else None


# what flatout watch finds


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
