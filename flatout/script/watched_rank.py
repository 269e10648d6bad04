"""A process that a watched script starts to train in: its steps are profiled or their memory is followed, it leaves its
answer for the parent of the trial, and trains on until it is ended, because the other ranks wait for it in their
collectives.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

from flatout.script.communication_calls import ranks_together
from flatout.script.entry import Target
from flatout.script.memory_watch import MemoryWatch
from flatout.script.own_modules import own_imports
from flatout.script.process_end import call_at_end
from flatout.script.profile_watch import ProfileWatch
from flatout.script.rank_answers import RankAnswers, read_settings
from flatout.script.trial.isolated_child import Answer, IsolatedChild, ObservedProcess
from flatout.script.trial.messages import Command


def observer_of(process: ObservedProcess, command: Command, answers: RankAnswers) -> MemoryWatch | ProfileWatch:
    if command["do"] == "memory":
        return MemoryWatch(process, steps=command["steps"], answers=answers)
    return ProfileWatch(process, command, answers=answers)


class WatchedProcess:
    """A process that is watched for some steps, and answers once. `name`: of its answer."""

    def __init__(self, folder: Path, name: str) -> None:
        settings = read_settings(folder)
        self.target = Target.from_command(settings["target"])
        self.answers = RankAnswers(folder, name)
        self._given, self._owner = False, os.getpid()
        self.answers.begin()
        self._observer = observer_of(self, settings["command"], self.answers)
        self._observer.install()

    @property
    def answers_still(self) -> bool:
        """Not in a process forked from this one."""
        return not self._given and os.getpid() == self._owner

    def on_torch(self, hooks: Sequence[Callable[[ModuleType], object]]) -> None:
        for hook in hooks:
            hook(sys.modules["torch"])

    def guarded(self, callback: Callable[[], None]) -> Callable[[], None]:
        """No error of ours reaches the script."""

        def call() -> None:
            if not self.answers_still:
                return
            try:
                with own_imports():
                    callback()
            except Exception as error:
                traceback.print_exc()
                self.give(f"{type(error).__name__}: {error}")

        return call

    def finish(self, answer: Answer) -> None:
        """It has been watched for as long as was asked."""
        self.give()

    def ended(self) -> None:
        """The script has ended before that."""
        if self.answers_still:
            self._observer.ended()
            self.give()

    def give(self, fault: str = "") -> None:
        self._given = True
        self._observer.stop()
        with contextlib.suppress(OSError, ValueError):
            self.answers.give(self._observer.rank_answer(fault))


class WatchedRank(WatchedProcess):
    """This process, once torch has been imported."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, str(os.getpid()))
        call_at_end(self._at_exit)

    def _at_exit(self) -> None:
        with own_imports(), contextlib.suppress(Exception):
            self.ended()


class ScriptsProcess:
    """The trial's own process: it ends with its answer, unless it trains together with others."""

    def __init__(self, child: IsolatedChild, answers: RankAnswers, command: Command) -> None:
        self._child, self._answers = child, answers
        self.target, self.on_torch, self.guarded = child.target, child.on_torch, child.guarded
        self.observer = observer_of(self, command, answers)

    def finish(self, answer: Answer) -> None:
        if ranks_together() is None:
            self._child.finish(answer)
        self.observer.stop()
        self._answers.give(self.observer.rank_answer())
