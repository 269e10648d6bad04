"""What the trials of one script have in common, and where they come from.

setup = TrialSetup(target=Target.from_command(["train.py"]), work_folder=folder)
with setup.trial([choice]) as trial:             # a process of its own, or a fork: see `fork_server`, `StartedScript`
    trial.start()
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from flatout.environment import inductor_folder, takes_files
from flatout.levers.lever import Choice
from flatout.machine.detect import usable_cores
from flatout.script.entry import Target
from flatout.script.trial.process import TrialProcess
from flatout.search.deadline import Deadline

if TYPE_CHECKING:
    from flatout.script.trial.fork_server import ForkServer

HANG_FLOOR_SECONDS = 30.0
LONG_START_SECONDS = 1.0
"""Below that, two starts in turn are quick enough."""
SIDE_BY_SIDE = 1.2
"""Times the usable cores: two starts that use this much together are still quicker at once than in turn."""
SAVED_FROM_SECONDS = 0.4
"""A shorter start is not worth the memory of a process that waits: a minute's tune makes some ten."""
WAITING_SHARE, WAITING_SHARE_OF_BUDGET = 0.5, 0.02
"""Shares of a start and of the budget: a start that waited longer says little about how long later ones take."""

Key = frozenset[tuple[str, object]]
"""The choices that have to be on before the first step."""


def mostly_waited(start_seconds: float, waiting_seconds: float, budget_seconds: float) -> bool:
    """Was a start mostly waiting, long enough to matter? A first one reads from disk what later ones find in memory."""
    return waiting_seconds > max(WAITING_SHARE * start_seconds, WAITING_SHARE_OF_BUDGET * budget_seconds)


class StartedScript:
    """A script at its first step, so that a tune starts it once: trials are forked from it. One process waits for each
    set of choices that have to be on before that step.

    with StartedScript() as started:
        setup = TrialSetup(..., started=started)
        with setup.trial() as first, setup.trial() as second:
            first.start()          # starts the script; that process stays at its first step, and `first` is forked
            second.start()         # forked as well, in milliseconds

    What a fork cannot have is said by `forking`. Where there is such an obstacle, where starts are short, or once a
    fork has written to files that the next would find, each trial starts the script.
    """

    def __init__(self, saved_from_seconds: float = SAVED_FROM_SECONDS) -> None:
        """saved_from_seconds: the shortest start that is saved."""
        self.obstacle = ""
        """Why no more trials are forked."""
        self._saved_from_seconds = saved_from_seconds
        self._processes: dict[Key, TrialProcess] = {}
        self._asked: set[Key] = set()
        """Whether they can be forked."""
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
        start_seconds, deadline = trial.start_seconds or 0.0, trial.deadline
        if not self.may_take(trial.choices) or start_seconds < self._saved_from_seconds:
            return False
        waits = deadline is not None and mostly_waited(start_seconds, trial.waiting_seconds, deadline.budget_seconds)
        if waits and not self._has_waited:
            self._has_waited = True  # whoever counts on the length of later starts will start it again
            return False
        key = _before_first_step(trial.choices)
        self._asked.add(key)
        return not trial.fork_obstacle()

    def add(self, process: TrialProcess) -> None:
        self._processes[_before_first_step(process.choices)] = process

    def close(self) -> None:
        """Ends all that were forked, too."""
        self.obstacle = self.obstacle or "it was closed"
        with contextlib.ExitStack() as closing:  # all of them, also where closing one fails
            for process in self._processes.values():
                closing.callback(process.close)
            self._processes = {}


def _before_first_step(choices: Sequence[Choice]) -> Key:
    return frozenset((choice.field, choice.value) for choice in choices if choice.lever.switch not in ("live", "once"))


@dataclass
class Starts:
    """Cost of the quickest start of the plain script."""

    seconds: float | None = None
    """Until its first step is recognized; None: not started yet."""
    cores: float | None = None
    """Cores it kept busy meanwhile; None: unknown."""

    @property
    def fit_side_by_side(self) -> bool:
        """Is a start long, and do two of them fit on the cores?"""
        if self.seconds is None or self.cores is None:
            return False
        return self.seconds >= LONG_START_SECONDS and 2 * self.cores <= SIDE_BY_SIDE * usable_cores()


@dataclass(frozen=True, kw_only=True)
class TrialSetup:
    """What every trial of one search has in common."""

    target: Target
    work_folder: Path
    """For scratch directories, configurations and logs; outside the isolation, removed by its owner."""
    shared: tuple[Path, ...] = ()
    """Folders to which trials write for real, besides those of ours."""
    levers: str = "flatout.levers.catalogue:LEVERS"
    isolation: Literal["auto", "overlay", "guard"] = "auto"
    allow_network: bool = False
    """Otherwise each trial has only a loopback interface of its own."""
    stdin_file: Path | None = None
    """What each trial reads; None: nothing."""
    inherits_stdin: bool = False
    """For a single trial: it reads what is piped into this process."""
    errors_apart: bool = False
    """Write stderr to a separate log?"""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Extra environment variables of the trials; with any, a trial is never forked."""
    fork_server: ForkServer | None = None
    """Forks trials where it can; None: each is a new process."""
    started: StartedScript | None = None
    """From what they are forked at the script's first step, where they can be; None: each starts the script."""
    deadline: Deadline | None = None
    """Of the tune; what overruns it is named in its explanation."""
    hang_floor_seconds: float = HANG_FLOOR_SECONDS
    terminal_size: tuple[int, int] | None = None
    """(rows, columns) where the script would read from a terminal: trials get one that is at end of file."""
    starts: Starts = field(default_factory=Starts)

    kind = "script"
    afresh = "in new processes"

    @property
    def name(self) -> str:
        return self.target.name

    def trial(self, choices: Sequence[Choice] = (), *, label: str = "trial") -> TrialProcess:
        """A process; `choices` are on from its start, windows add to them."""
        return TrialProcess(self, choices, label=label)

    def environment_of(self, choices: Sequence[Choice]) -> dict[str, str]:
        """The variables of a trial under these choices, beside those of this process."""
        of_levers = [choice.lever.environment(choice.value) for choice in choices]
        return {name: value for part in (self.environment, *of_levers) for name, value in part.items()}

    def spared_seconds(self, choices: Sequence[Choice] = ()) -> float:
        """By how much a trial with these choices starts sooner than a new process."""
        if self.environment_of(choices):
            return 0.0
        waiting = None if self.started is None else self.started.process(choices)
        if waiting is not None:
            return waiting.startup_seconds or 0.0
        server = self.fork_server
        return server.load_seconds if server is not None and server.is_ready() else 0.0

    def in_new_processes(self) -> TrialSetup:
        return replace(self, fork_server=None, started=None)

    def from_the_start(self) -> TrialSetup:
        return replace(self, started=None) if self.started is not None and self.started.is_used else self

    @property
    def shared_folder(self) -> Path:
        """All trials write there for real."""
        folder = self.work_folder / "shared"
        folder.mkdir(exist_ok=True)
        return folder

    @property
    def written(self) -> tuple[Path, ...]:
        """All folders to which trials write for real; compiled kernels are kept, too, where there is a place for
        them."""
        kernels = inductor_folder()
        return *([kernels] if takes_files(kernels) else []), self.shared_folder, *self.shared

    @property
    def starts_overlap(self) -> bool:
        """Is it quicker to start two trials at once? Imports and reading data overlap well, but first steps that use
        all cores slow each other down. With the machine's network, trials would compete for the script's ports."""
        if self.allow_network or (self.started is not None and self.started.process() is not None):
            return False
        forked = self.fork_server is not None and self.fork_server.is_ready()
        return not forked or self.starts.fit_side_by_side


def terminal_size() -> tuple[int, int] | None:
    """(rows, columns) of the terminal that the script would read from if started directly."""
    try:
        size = os.get_terminal_size(0)
    except OSError:
        return None
    return size.lines, size.columns
