"""A run as another process sees it: its last state, and whether it still goes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from flatout.diagnose.run_state import RunState
from flatout.machine.processes import pid_namespace, process_condition

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
