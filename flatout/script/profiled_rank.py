"""A process that a profiled script starts to train in: it goes through the windows of a profile, leaves its answer for
the parent of the trial, and trains on until it is ended, because the other ranks wait for it in their collectives.
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
from flatout.script.own_modules import own_imports
from flatout.script.process_end import call_at_end
from flatout.script.profile_watch import ProfileWatch
from flatout.script.rank_answers import RankAnswers, read_settings
from flatout.script.trial.isolated_child import IsolatedChild
from flatout.script.trial.messages import Command, ProfileAnswer


class ProfiledProcess:
    """A process that goes through the windows of a profile, and answers once. `name`: of its answer."""

    def __init__(self, folder: Path, name: str) -> None:
        settings = read_settings(folder)
        given = settings["target"]
        self.target = Target(path=given["path"], module=given["module"], arguments=tuple(given["arguments"]))
        self.answers = RankAnswers(folder, name)
        self._given = False
        self.answers.begin()
        self._watch = ProfileWatch(self, settings["command"], answers=self.answers)
        self._watch.install()

    @property
    def answers_still(self) -> bool:
        return not self._given

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
                self.give({"event": "profile", "ended": False, "steps": 0}, f"{type(error).__name__}: {error}")

        return call

    def finish(self, answer: ProfileAnswer) -> None:
        """The windows are over."""
        self.give(answer)

    def ended(self) -> None:
        """The script has ended before they were."""
        if self.answers_still:
            self.give(self._watch.ended())

    def give(self, answer: ProfileAnswer, fault: str = "") -> None:
        self._given = True
        self._watch.watch.uninstall()
        self.answers.give(self._watch.rank_answer(answer, fault))


class ProfiledRank(ProfiledProcess):
    """This process, once torch has been imported."""

    def __init__(self, folder: Path) -> None:
        self._owner = os.getpid()
        super().__init__(folder, str(self._owner))
        call_at_end(self._at_exit)

    @property
    def answers_still(self) -> bool:
        """Not in a process forked from this one."""
        return super().answers_still and os.getpid() == self._owner

    def _at_exit(self) -> None:
        with own_imports(), contextlib.suppress(Exception):
            self.ended()

    def give(self, answer: ProfileAnswer, fault: str = "") -> None:
        with contextlib.suppress(OSError, ValueError):
            super().give(answer, fault)


class ScriptsProcess:
    """The trial's own process: it ends with its answer, unless it trains together with others."""

    def __init__(self, child: IsolatedChild, answers: RankAnswers, command: Command) -> None:
        self._child, self._answers = child, answers
        self.target, self.on_torch, self.guarded = child.target, child.on_torch, child.guarded
        self.watch = ProfileWatch(self, command, answers=answers)

    def finish(self, answer: ProfileAnswer) -> None:
        if ranks_together() is None:
            self._child.finish(answer)
        self._answers.give(self.watch.rank_answer(answer))
        self.watch.watch.uninstall()


def follow(folder: Path) -> None:
    """Profile this process."""
    ProfiledRank(folder)
