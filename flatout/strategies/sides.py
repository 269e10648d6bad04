"""A way to train, as a trial whose steps are timed on command: one process, or ranks under a strategy."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from flatout.errors import MachineError
from flatout.plan import Plan
from flatout.script.entry import Target
from flatout.script.replicas.settings import refusal_of
from flatout.script.trial.answers import TrialEnded
from flatout.script.trial.setup import TrialSetup
from flatout.strategies.facts import strategy_of
from flatout.strategies.told import TRAINER, Told
from flatout.tuning.devices.ranks_trial import RanksRefused
from flatout.tuning.ranks.script import ScriptRanks
from flatout.tuning.trials import RunningTrial
from flatout.tuning.windows import Arm

WARM_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Way:
    """Training with what the user's function makes for a plan."""

    setup: TrialSetup
    """Of trials in new processes; what they run is ours."""
    spec: str
    plan: Plan
    ranks: int
    """1: one process."""
    step_seconds: float | None
    """Decides when a trial counts as hanging; None: unknown."""
    patience_seconds: float
    """For the first step."""
    samples: int | None = None
    """In a batch of one process; None: unknown."""

    @contextlib.contextmanager
    def running(self) -> Iterator[RunningTrial]:
        """At the end of its first step. Raises RanksRefused where the strategy, or the user's function, refuses."""
        label = strategy_of(self.plan).replace(" ", "-")
        folder = Path(tempfile.mkdtemp(prefix=f"{label}-told-", dir=self.setup.work_folder))
        told = Told(spec=self.spec, plan=self.plan.to_toml(), role="train", ranks=self.ranks, samples=self.samples)
        told.write(folder)
        with self._trial(folder, label) as trial:
            try:
                trial.start(self.patience_seconds)
            except TrialEnded as end:
                raise refused(folder) or end from None
            trial.expected_step_seconds = self.step_seconds
            yield trial

    @contextlib.contextmanager
    def started(self) -> Iterator[Arm]:
        with self.running() as trial:
            yield Arm(trial, suspended=True)

    @contextlib.contextmanager
    def warmed_up(self) -> Iterator[Arm]:
        """At the end of some more steps, for a run that is timed as a whole."""
        with self.started() as arm:
            arm.window(settle=WARM_STEPS, steps=1)
            yield arm

    def _trial(self, folder: Path, label: str) -> RunningTrial:
        setup = replace(self.setup, target=trainer(folder), shared=(*self.setup.shared, folder))
        if self.ranks == 1:
            return setup.trial(label=label)
        return ScriptRanks(setup=setup, count=self.ranks).trial(label=label)


@dataclass(frozen=True, kw_only=True)
class TwoWays:
    """Sides of a comparison (`flatout.tuning.last_comparison.Sides`)."""

    one: Way
    other: Way

    @contextlib.contextmanager
    def together(self) -> Iterator[tuple[Arm, Arm]]:
        """One after the other: what refuses is known before the second one starts."""
        with self.other.started() as candidate, self.one.started() as baseline:
            yield baseline, candidate

    def baseline(self) -> AbstractContextManager[Arm]:
        return self.one.warmed_up()

    def candidate(self) -> AbstractContextManager[Arm]:
        return self.other.warmed_up()


def trainer(folder: Path) -> Target:
    """The module of ours that does what `folder` says."""
    return Target(module=TRAINER, arguments=(str(folder),))


def refused(folder: Path) -> RanksRefused | None:
    """Why a process of the folder did not go on; None: none has said so."""
    found = refusal_of(folder)
    if found is None:
        return None
    kind = " (on this machine)" * isinstance(found, MachineError)
    return RanksRefused(found.what + kind, limit=found.limit, remedy=found.remedy)
