"""Trials of a script that trains in ranks by itself: what a tune needs of them.

    ScriptRanks(setup, 2).trial([])             # a group of two processes of the script, started as by torchrun
    ScriptRanks(setup, 2, own=True).trial([])   # of two that the script starts: mp.spawn, a launcher in it

All ranks are in one isolation: they see one another's files and processes, and nothing of theirs stays.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from flatout.errors import ScriptError
from flatout.levers.lever import Choice, Lever
from flatout.script.trial.answers import Answer, TrialHangs
from flatout.script.trial.commanded_rank import SETTINGS, RankSettings
from flatout.script.trial.commands import as_json
from flatout.script.trial.process import START_TIMEOUT_SECONDS
from flatout.script.trial.rank_starter import END
from flatout.script.trial.setup import TrialSetup
from flatout.tuning.ranks.group import SCRIPT, RankGroup
from flatout.tuning.ranks.job import ISOLATION, SCRATCH, JobRequest
from flatout.units import format_seconds

NOT_IN_RANKS = ("device", "optimizer_in_backward")
"""Plan fields that are not tried: they move the model, or take gradients before ranks have averaged them."""


@dataclass(frozen=True, kw_only=True)
class ScriptRanks:
    """What every trial of one search has in common."""

    setup: TrialSetup
    count: int
    """How many ranks."""
    own: bool = False
    """Does the script start them itself?"""

    kind = "script"
    afresh = "in new processes"
    starts_overlap = False
    """Two groups would compete for the cores."""

    @property
    def name(self) -> str:
        return self.setup.name

    def trial(self, choices: Sequence[Choice] = (), *, label: str = "trial") -> ScriptRanksTrial:
        return ScriptRanksTrial(self.setup, self.count, choices, label=label, own=self.own)

    def levers_of(self, levers: Sequence[Lever]) -> list[Lever]:
        """Those that may be tried. Processes that the script starts are reached once they train: levers that must be on
        before are not."""
        found = [lever for lever in levers if lever.plan_field not in NOT_IN_RANKS]
        return [lever for lever in found if lever.switch == "live"] if self.own else found

    def spared_seconds(self, choices: Sequence[Choice] = ()) -> float:
        return 0.0  # a group of processes that talk to each other cannot be forked

    def from_the_start(self) -> ScriptRanks:
        return self

    def in_new_processes(self) -> ScriptRanks:
        return self

    @property
    def shared_folder(self) -> Path:
        return self.setup.shared_folder


class ScriptRanksTrial(RankGroup):
    """One group, started as by torchrun, or by the script itself."""

    def __init__(
        self, setup: TrialSetup, count: int, choices: Sequence[Choice] = (), *, label: str = "ranks", own: bool = False
    ) -> None:
        super().__init__(setup, count, choices, label=label)
        self._own = own

    def prepare(self) -> JobRequest:
        told: RankSettings = {
            "levers": self.setup.levers,
            "choices": as_json(self.choices),
            "target": self.setup.target.command,
        }
        (self.folder / SETTINGS).write_text(json.dumps(told), encoding="utf-8")
        return JobRequest(
            kind="own-ranks" if self._own else "ranks",
            target=self.setup.target,
            devices=self.count,
            allow_network=self.setup.allow_network,
            shared=tuple(str(path) for path in (self.folder, *self.setup.written)),
            variables=tuple(self.setup.environment_of(self.choices).items()),
        )

    def start(self, timeout_seconds: float = START_TIMEOUT_SECONDS) -> None:
        try:
            with self._starting():
                super().start(timeout_seconds)
        except TrialHangs as hang:
            network = "the machine's network" if self.setup.allow_network else "a loopback interface alone"
            made = f"not all of {self.count} ranks made a step in {format_seconds(hang.seconds)}{hang.last_at}"
            raise ScriptError(
                f"{self.setup.name}: {made}",
                limit=f"ranks of a trial have {network}",
                remedy="let them meet on localhost, or pass --allow-network; if it starts slowly: a larger --budget",
            ) from None
        self.isolation = json.loads((self.folder / ISOLATION).read_text(encoding="utf-8"))

    def check(self, answer: Answer) -> None:
        if answer["event"] != "ready" or (ranks := answer["ranks"]) == self.count:
            return
        if ranks > 1:
            raise ScriptError(
                f"{self.setup.name} trains in {ranks} ranks",
                limit=f"it was to train in {self.count}",
                remedy=f"give {ranks} in place of {self.count}",
            )
        raise ScriptError(
            f"{self.setup.name} trains by itself in each of {self.count} processes",
            limit="a first step is over, and torch.distributed has joined no ranks",
            remedy="a script for one process is tuned without --nproc-per-node; on several devices: --devices",
        )

    def scratch(self) -> Sequence[Path]:
        return (self.folder / SCRATCH,)

    def ends_of_others(self, known: Collection[int]) -> dict[int, object]:  # JSON
        """And of the process of a script that starts them itself, which knows why a rank has failed."""
        try:
            answer = json.loads((self.folder / END).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return super().ends_of_others(known)
        return {**super().ends_of_others(known), SCRIPT: answer}
