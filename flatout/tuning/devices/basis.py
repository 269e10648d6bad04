"""What a choice of the number of devices starts from: the tune on one device, and the time that is left."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatout.levers.lever import Choice
from flatout.machine.description import Machine
from flatout.script.replicas.settings import Settings
from flatout.script.replicas.starting import write_settings
from flatout.script.trial.setup import TrialSetup
from flatout.search.deadline import BudgetSpent, Deadline
from flatout.tuning.ranks.job import JobRequest, RanksJob
from flatout.tuning.results import SearchState
from flatout.tuning.windows import Pace

RANKS_START = 1.5
"""Times the start of one process: that of a group, whose processes share the cores."""


@dataclass(frozen=True, kw_only=True)
class Basis:
    """Of one script."""

    state: SearchState
    """Of the search on one device."""
    setup: TrialSetup
    """Of trials in new processes."""
    machine: Machine
    settings: Settings
    """Of the ranks."""
    step_seconds: float
    """On one device, under its best plan."""
    deadline: Deadline
    """One of its own, which Ctrl-C stops."""
    progress: Callable[[str], None]

    @property
    def kept(self) -> Sequence[Choice]:
        """On one device."""
        return self.state.kept

    @property
    def on_cpu(self) -> bool:
        return self.state.observed.device.partition(":")[0] == "cpu"

    @property
    def batch_size(self) -> int | None:
        """None: no loader says."""
        return max((one.batch_size for one in self.state.first_observed.loaders if one.batch_size), default=None)

    @property
    def start_seconds(self) -> float:
        """Of a process on one device, until its first step."""
        return self.state.startup_seconds or 0.0

    def has_time_for(self, seconds: float) -> bool:
        return self.deadline.seconds_left > seconds

    def still_wanted(self) -> bool:
        return not self.deadline.stopped

    def result_of(self, request: JobRequest, settings: Settings | None = None) -> Any:  # JSON, as the child wrote it
        """What a process of ours finds that starts ranks; settings: of the ranks, if not those of all. Raises what it
        raises, and BudgetSpent where that is not wanted any more."""
        folder = Path(tempfile.mkdtemp(prefix=f"{request.kind}-", dir=self.setup.work_folder))
        write_settings(settings or self.settings, folder)
        with RanksJob(folder, request) as job:
            found = job.result(self.still_wanted)
        if found is None:
            raise BudgetSpent(self.deadline)
        return found

    def pace(self, seconds: float) -> Pace:
        return Pace.for_step(self.step_seconds, seconds=seconds).within(self.state.total_steps)
