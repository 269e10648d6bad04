"""Trials that are forked from a script at its first step, so that they pay for one start of it: the parent's side.

    with started_once(setup) as setup, setup.trial() as first, setup.trial() as second:
        ...                                                           # the script has been started once

What a fork cannot have is said by `forking`. Where there is such an obstacle, or a fork has written to files that the
next would find, trials are started by themselves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from flatout.script.trial.process import TrialProcess

if TYPE_CHECKING:
    from flatout.levers.lever import Choice
    from flatout.script.trial.process import TrialSetup


@contextlib.contextmanager
def started_once(setup: TrialSetup) -> Iterator[TrialSetup]:
    """The same, whose trials are forked so within the context, where that is possible."""
    with StartedScript() as started:
        yield replace(setup, started=started)


class StartedScript:
    """One start for each set of choices that are on from the start of a process."""

    def __init__(self) -> None:
        self.obstacle = ""
        """Why no more trials are forked."""
        self._processes: dict[tuple[tuple[str, object], ...], TrialProcess] = {}

    def __enter__(self) -> StartedScript:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def process(self, setup: TrialSetup, choices: Sequence[Choice]) -> TrialProcess | None:
        """One at its first step, to be forked; started now if there was none yet. None: there is an obstacle.

        Raises TrialError where the script fails before its first step.
        """
        if self.obstacle:
            return None
        key = tuple((choice.field, choice.value) for choice in choices)
        if key not in self._processes:
            process = TrialProcess(replace(setup, started=None), choices, label="start", may_be_forked=True)
            try:
                process.start()
                self.obstacle = setup.starts.fork_obstacle = process.fork_obstacle()
            except BaseException:
                process.close()
                raise
            if self.obstacle:
                process.close()
                return None
            self._processes[key] = process
        return self._processes[key]

    def close(self) -> None:
        """Ends all that were forked, too."""
        self.obstacle = self.obstacle or "it was closed"
        for process in self._processes.values():
            process.close()
        self._processes.clear()
