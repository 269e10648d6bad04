"""One device under its best plan against several devices, each in new processes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flatout.levers.lever import Choice, split_by_switch
from flatout.script.replicas.settings import NOT_IN_RANKS, Settings
from flatout.script.trial.setup import TrialSetup
from flatout.tuning.devices.ranks_trial import RanksTrial
from flatout.tuning.windows import Arm


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

    setup: TrialSetup
    settings: Settings
    devices: int
    kept: Sequence[Choice]
    """On one device."""
    in_ranks: Sequence[Choice]
    step_seconds: float
    """Of one device; decides when a trial counts as hanging."""

    @contextlib.contextmanager
    def together(self) -> Iterator[tuple[Arm, Arm]]:
        """One after the other: what refuses a script on several devices is known before one is started."""
        with self.candidate() as several, self.baseline() as one:
            yield one, several

    @contextlib.contextmanager
    def baseline(self) -> Iterator[Arm]:
        from_start, live = split_by_switch(self.kept)
        with self.setup.trial(from_start, label="one-device") as trial:
            trial.expected_step_seconds = self.step_seconds
            trial.interruptible = True
            trial.start()
            yield Arm(trial, live, suspended=True)

    @contextlib.contextmanager
    def candidate(self) -> Iterator[Arm]:
        from_start, live = split_by_switch(self.in_ranks)
        with RanksTrial(self.setup, self.settings, self.devices, from_start) as trial:
            trial.start()
            trial.expected_step_seconds = self.step_seconds
            yield Arm(trial, live, suspended=True)
