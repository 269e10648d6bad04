"""What a choice of the number of devices starts from, and one device under its best plan against several.

with RanksTrial(setup, settings, 2) as trial:      # a script on several devices, some of whose steps are timed
    trial.start()                                  # until each rank is at the end of its first step
    trial.window([], settle=1, steps=20).seconds   # as of a trial that is one process
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from flatout.errors import TrialError
from flatout.levers.lever import Choice, split_by_switch
from flatout.machine.description import Machine
from flatout.script.replicas.settings import NOT_IN_RANKS, SCRATCH, Settings, refusal_of
from flatout.script.replicas.starting import write_settings
from flatout.script.trial.answers import Answer
from flatout.script.trial.setup import TrialSetup
from flatout.search.deadline import BudgetSpent, Deadline
from flatout.tuning.ranks.group import RankGroup
from flatout.tuning.ranks.job import JobRequest, RanksJob
from flatout.tuning.results import SearchState
from flatout.tuning.windows import Arm, Pace

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

    def result_of(
        self, kind: Literal["collectives", "proof"], devices: int, settings: Settings | None = None, steps: int = 0
    ) -> Answer:
        """What a process of ours finds that starts ranks; settings: of the ranks, if not those of all. Raises what it
        raises, and BudgetSpent where that is not wanted any more."""
        folder = Path(tempfile.mkdtemp(prefix=f"{kind}-", dir=self.setup.work_folder))
        write_settings(settings or self.settings, folder)
        target, network = self.setup.target, self.setup.allow_network
        request = JobRequest(kind=kind, target=target, devices=devices, allow_network=network, steps=steps)
        with RanksJob(folder, request) as job:
            found = job.result(lambda: not self.deadline.stopped)
        if found is None:
            raise BudgetSpent(self.deadline)
        return found

    def pace(self, seconds: float) -> Pace:
        return Pace.for_step(self.step_seconds, seconds=seconds).within(self.state.total_steps)


class RanksRefused(TrialError):
    """The script cannot be shared: `what`, `limit` and `remedy` say why, as `flatout run --devices` would."""


class RanksTrial(RankGroup):
    """One group. Choices given here are on from its start; windows add to them."""

    def __init__(self, setup: TrialSetup, settings: Settings, devices: int, choices: Sequence[Choice] = ()) -> None:
        super().__init__(setup, devices, choices, label="ranks")
        self._settings = settings

    def prepare(self) -> JobRequest:
        told = replace(
            self._settings,
            visible=self._settings.visible[: self.count],
            is_trial=True,
            levers=self.setup.levers,
            choices=tuple(tuple(choice.to_json()) for choice in self.choices),
        )
        write_settings(told, self.folder, *self.setup.shared)
        return JobRequest(
            kind="replicas", target=self.setup.target, devices=self.count, allow_network=self.setup.allow_network
        )

    def refusal(self) -> TrialError | None:
        found = refusal_of(self.folder)
        return None if found is None else RanksRefused(found.what, limit=found.limit, remedy=found.remedy)

    def scratch(self) -> Sequence[Path]:
        return [self.folder / f"{SCRATCH}{rank}" for rank in range(self.count)]


def for_ranks(kept: Sequence[Choice], *, on_cpu: bool) -> tuple[list[Choice], dict[str, str]]:
    """(the levers of each rank, choice -> why ranks do without)."""
    why = dict.fromkeys(NOT_IN_RANKS, "ranks do without it")
    if on_cpu:
        why["threads"] = "ranks share the cores"
    left_out = {choice.field: why[choice.field] for choice in kept if choice.field in why}
    return [choice for choice in kept if choice.field not in why], left_out


@dataclass(frozen=True, kw_only=True)
class OneAndSeveral:
    """The sides of such a comparison."""

    basis: Basis
    devices: int
    in_ranks: Sequence[Choice]

    @contextlib.contextmanager
    def together(self) -> Iterator[tuple[Arm, Arm]]:
        """One after the other: what refuses a script on several devices is known before one is started."""
        with self.candidate() as several, self.baseline() as one:
            yield one, several

    @contextlib.contextmanager
    def baseline(self) -> Iterator[Arm]:
        from_start, live = split_by_switch(self.basis.kept)
        with self.basis.setup.trial(from_start, label="one-device") as trial:
            trial.expected_step_seconds = self.basis.step_seconds
            trial.interruptible = True
            trial.start()
            yield Arm(trial, live, suspended=True)

    @contextlib.contextmanager
    def candidate(self) -> Iterator[Arm]:
        from_start, live = split_by_switch(self.in_ranks)
        with RanksTrial(self.basis.setup, self.basis.settings, self.devices, from_start) as trial:
            trial.start()
            trial.expected_step_seconds = self.basis.step_seconds
            yield Arm(trial, live, suspended=True)
