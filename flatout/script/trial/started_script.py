"""Trials that are forked from a script at its first step, so that a tune starts the script once: the parent's side.

    with StartedScript() as started:
        setup = TrialSetup(..., started=started)
        with setup.trial() as first, setup.trial() as second:
            first.start()          # starts the script; that process stays at its first step, and `first` is forked
            second.start()         # forked as well, in milliseconds

What a fork cannot have is said by `forking`. Where there is such an obstacle, where starts are short, or once a fork
has written to files that the next would find, each trial starts the script.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from flatout.levers.lever import Choice
    from flatout.script.trial.process import TrialProcess

SAVED_FROM_SECONDS = 0.4
"""A shorter start is not worth the memory of a process that waits: a minute's tune makes some ten."""
WAITING_SHARE, WAITING_SHARE_OF_BUDGET = 0.5, 0.02
"""Shares of a start and of the budget: a start that waited longer says little about how long later ones take."""

Key = frozenset[tuple[str, object]]
"""The choices that have to be on before the first step."""


class Start(Protocol):
    """That of a trial."""

    @property
    def start_seconds(self) -> float | None: ...

    @property
    def waiting_seconds(self) -> float:
        """The part of it in which neither the process nor anything it started was computing."""


def mostly_waited(start: Start, budget_seconds: float) -> bool:
    """Was it mostly waiting, long enough to matter? A first start reads from disk what later ones find in memory."""
    start_seconds = start.start_seconds or 0.0
    return start.waiting_seconds > max(WAITING_SHARE * start_seconds, WAITING_SHARE_OF_BUDGET * budget_seconds)


class StartedScript:
    """The processes that wait: one for each set of choices that have to be on before the first step."""

    def __init__(self, saved_from_seconds: float = SAVED_FROM_SECONDS) -> None:
        """saved_from_seconds: the shortest start that is saved."""
        self.obstacle = ""
        """Why no more trials are forked."""
        self._saved_from_seconds = saved_from_seconds
        self._processes: dict[Key, TrialProcess] = {}
        self._asked: dict[Key, str] = {}
        """Why it cannot be forked, of each process that was asked; '' if it can."""
        self._has_waited = False

    def __enter__(self) -> StartedScript:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_used(self) -> bool:
        """Does any process wait?"""
        return bool(self._processes)

    def process(self, choices: Sequence[Choice] = ()) -> TrialProcess | None:
        """One at its first step, to be forked; None where there is none."""
        return None if self.obstacle else self._processes.get(_before_first_step(choices))

    def may_take(self, choices: Sequence[Choice]) -> bool:
        """Could the process of a trial with these choices wait for others to be forked from it? One with a choice that
        cannot be turned off again could not: a fork without it would have it."""
        if any(choice.lever.switch == "once" for choice in choices):
            return False
        key = _before_first_step(choices)
        return not (self.obstacle or key in self._asked)

    def takes(self, trial: TrialProcess) -> bool:
        """Is its process, which is at its first step, to wait there? `add` must follow."""
        if not self.may_take(trial.choices) or (trial.start_seconds or 0.0) < self._saved_from_seconds:
            return False
        budget_seconds = None if trial.deadline is None else trial.deadline.budget_seconds
        if budget_seconds is not None and not self._has_waited and mostly_waited(trial, budget_seconds):
            self._has_waited = True  # whoever counts on the length of later starts will start it again
            return False
        key = _before_first_step(trial.choices)
        self._asked[key] = obstacle = trial.fork_obstacle()
        return not obstacle

    def add(self, process: TrialProcess) -> None:
        self._processes[_before_first_step(process.choices)] = process

    def obstacle_to(self, choices: Sequence[Choice] = ()) -> str:
        """Why trials with these choices are not forked; '' also where that is not known yet."""
        return self.obstacle or self._asked.get(_before_first_step(choices), "")

    def close(self) -> None:
        """Ends all that were forked, too."""
        self.obstacle = self.obstacle or "it was closed"
        with contextlib.ExitStack() as closing:  # all of them, also where closing one fails
            for process in self._processes.values():
                closing.callback(process.close)
            self._processes = {}


def _before_first_step(choices: Sequence[Choice]) -> Key:
    return frozenset((choice.field, choice.value) for choice in choices if choice.lever.switch not in ("live", "once"))
