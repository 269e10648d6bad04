"""What search, proof and comparison ask of trials, whatever is tried in them.

TrialSetup     trials of a script: each is a process of its own (`trial_process`)
StepTrials     trials of a TrainStep: each is a copy of it in this process (`step_trial`)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from flatout.levers.lever import Choice
from flatout.levers.observed import Observed, StepWork
from flatout.script.numerics import NumericsAnswer, NumericsRequest
from flatout.script.trial.answers import PEAK_STEPS, Peak, Window
from flatout.search.deadline import Deadline

WAITING_SHARE, WAITING_SHARE_OF_BUDGET = 0.5, 0.02
"""Of a start, and of the budget: from there on how long the start took says little about how long later ones will."""


class RunningTrial(Protocol):
    """One trial, at a step boundary. Its steps raise TrialError where it fails, TrialEnded where it has no more."""

    expected_step_seconds: float | None
    """A plain step's length, from which follows when silence counts as hanging; None: not known yet."""
    first_steps_seconds: float
    """Patience until that is known."""
    interruptible: bool
    """Do steps that are under way when the deadline passes end soon afterwards, with BudgetSpent?"""
    deadline: Deadline | None

    @property
    def isolation(self) -> Mapping[str, object]: ...

    @property
    def startup_seconds(self) -> float | None:
        """Of a new process, until the first certain step."""

    @property
    def start_seconds(self) -> float | None:
        """The same, as it was here."""

    @property
    def waiting_seconds(self) -> float:
        """Of that: in which neither it nor anything it had started was computing."""

    @property
    def alive(self) -> bool: ...

    def __enter__(self) -> RunningTrial: ...

    def __exit__(self, *_: object) -> None: ...

    def spawn(self) -> None:
        """Begin to start, and wait for nothing; `start` must follow."""

    def start(self, timeout_seconds: float = ...) -> None: ...

    def describe(self) -> Observed: ...

    def window(self, choices: Sequence[Choice], *, settle: int, steps: int, suspended: bool = False) -> Window: ...

    def breakdown(self, choices: Sequence[Choice], *, steps: int) -> Observed: ...

    def work(self) -> StepWork: ...

    def peak(self, choices: Sequence[Choice], *, steps: int = PEAK_STEPS) -> Peak: ...

    def numerics(self, choices: Sequence[Choice], request: NumericsRequest) -> NumericsAnswer: ...

    def close(self) -> None: ...


class Trials(Protocol):
    """Where trials come from, and what they have in common."""

    @property
    def name(self) -> str:
        """Of what is tried, for messages."""

    @property
    def kind(self) -> str:
        """'script' or 'step'."""

    @property
    def afresh(self) -> str:
        """How a trial begins, in words: 'in fresh processes'."""

    @property
    def work_folder(self) -> Path: ...

    @property
    def starts_overlap(self) -> bool:
        """Is it quicker to start two trials at once than one after the other?"""

    def trial(self, choices: Sequence[Choice] = (), *, label: str = "trial") -> RunningTrial:
        """A new one; `choices` hold from its start."""

    @property
    def loading_seconds(self) -> float:
        """That a new process takes longer to start than these do: in which it loads torch."""

    def in_new_processes(self) -> Trials:
        """The same, none of them forked from a process that has loaded torch."""

    def sharing(self, folder: Path) -> Trials:
        """The same, where all trials may write into this folder."""


def mostly_waited(trial: RunningTrial, budget_seconds: float) -> bool:
    """Was starting it mostly waiting, long enough to matter? A first start reads from the disk what later ones find in
    memory, and it is later ones that proof and comparison are made of."""
    start_seconds = trial.start_seconds or 0.0
    return trial.waiting_seconds > max(WAITING_SHARE * start_seconds, WAITING_SHARE_OF_BUDGET * budget_seconds)
