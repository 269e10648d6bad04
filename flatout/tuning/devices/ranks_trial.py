"""A trial that is a script on several devices: some of its steps are timed on command.

with RanksTrial(setup, settings, 2) as trial:
    trial.start()                                  # until each rank is at the end of its first step
    trial.window([], settle=1, steps=20).seconds   # as of a trial that is one process
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from flatout.errors import TrialError
from flatout.levers.lever import Choice
from flatout.script.replicas.refusal import refusal_of
from flatout.script.replicas.settings import SCRATCH, Settings
from flatout.script.replicas.starting import write_settings
from flatout.script.trial.setup import TrialSetup
from flatout.tuning.ranks.group import RankGroup
from flatout.tuning.ranks.job import JobRequest


class RanksRefused(TrialError):
    """The script cannot be shared: `what`, `limit` and `remedy` say why, as `flatout run --devices` would."""


class RanksTrial(RankGroup):
    """One group. Choices given here are on from its start; windows add to them."""

    def __init__(
        self,
        setup: TrialSetup,
        settings: Settings,
        devices: int,
        choices: Sequence[Choice] = (),
        *,
        label: str = "ranks",
    ) -> None:
        super().__init__(setup, devices, choices, label=label)
        self._settings = settings

    def __enter__(self) -> RanksTrial:
        return self

    def prepare(self) -> JobRequest:
        told = replace(
            self._settings,
            visible=self._settings.visible[: self.count],
            takes_commands=True,
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
