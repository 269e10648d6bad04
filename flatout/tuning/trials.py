"""What search, proof and comparison need of trials, whatever runs in them.

TrialSetup     trials of a script: each is a process of its own (`flatout.script.trial`)
StepTrials     trials of a TrainStep: each is a copy of it in this process (`step_tuning`)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, Self, TypeVar

from flatout.errors import TrialError
from flatout.levers.lever import Choice
from flatout.levers.observed import Observed, StepWork
from flatout.script.numerics import NumericsAnswer, NumericsRequest
from flatout.script.trial.answers import PEAK_STEPS, Peak, TrialEnded, Window
from flatout.search.deadline import Deadline

T = TypeVar("T")


class Timed(Protocol):
    """Something whose steps are timed: a trial, or a group of ranks."""

    def window(self, choices: Sequence[Choice], *, settle: int, steps: int, suspended: bool = False) -> Window: ...


class RunningTrial(Timed, Protocol):
    """One trial, at a step boundary. Its steps raise TrialError where it fails, TrialEnded where there are no more."""

    expected_step_seconds: float | None
    """Length of a plain step, which determines when the trial counts as hanging; None: unknown."""
    first_steps_seconds: float
    """Timeout until that is known."""
    interruptible: bool
    """Are steps in progress interrupted soon after the deadline, with BudgetSpent?"""
    deadline: Deadline | None

    isolation: dict[str, object]
    startup_seconds: float | None
    """Of a new process, until its first step is recognized."""
    start_seconds: float | None
    """The same, as measured here."""
    waiting_seconds: float
    """The part of it in which neither the process nor anything it started was computing."""

    @property
    def alive(self) -> bool: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def spawn(self) -> None:
        """Begin to start without waiting; `start` must follow."""

    def start(self, timeout_seconds: float = ...) -> None: ...

    def describe(self) -> Observed: ...

    def breakdown(self, choices: Sequence[Choice], *, steps: int) -> Observed: ...

    def work(self) -> StepWork: ...

    def peak(self, choices: Sequence[Choice], *, steps: int = PEAK_STEPS) -> Peak: ...

    def numerics(self, choices: Sequence[Choice], request: NumericsRequest) -> NumericsAnswer: ...

    def close(self) -> None: ...


class Trials(Protocol):
    """Where trials come from, and what they have in common."""

    @property
    def name(self) -> str:
        """Name of the subject, for messages."""

    @property
    def kind(self) -> str:
        """'script' or 'step'."""

    @property
    def afresh(self) -> str:
        """How a trial starts, in words: 'in new processes'."""

    @property
    def starts_overlap(self) -> bool:
        """Is it quicker to start two trials at once than in turn?"""

    def trial(self, choices: Sequence[Choice] = (), *, label: str = "trial") -> RunningTrial:
        """A new trial; `choices` are on from its start."""

    def spared_seconds(self, choices: Sequence[Choice] = ()) -> float:
        """By how much a trial with these choices on from its start begins sooner than the first one, or a new process:
        what it needs is there already."""

    def from_the_start(self) -> Trials:
        """The same, none of them forked from one that has made steps; itself where none is."""

    def in_new_processes(self) -> Trials:
        """The same, none of them forked from another process."""

    @property
    def shared_folder(self) -> Path:
        """All trials may write there."""


def once_more_if_ended(process: Callable[[], RunningTrial], ask: Callable[[RunningTrial], T]) -> T:
    """What a live trial answers; a new one where the script came to its end meanwhile."""
    for last in (False, True):
        running = process()
        try:
            return ask(running)
        except TrialError as error:
            running.close()
            if last or not (isinstance(error, TrialEnded) and error.by_itself):
                raise
    raise AssertionError


def restart_seconds(trials: Trials, startup_seconds: float | None, choices: Sequence[Choice] = ()) -> float:
    """Of one more trial, with these choices on from its start. startup_seconds: of the first one."""
    return max(0.0, (startup_seconds or 0.0) - trials.spared_seconds(choices))
