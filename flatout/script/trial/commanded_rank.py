"""A trial's process that is one of several ranks: at the end of each step it waits for a command, and all ranks get the
same. The parent's end of all of them is `flatout.tuning.ranks.group`.

Run as a module, it is one rank of a script that trains in ranks by itself (`flatout.tuning.ranks.script`). What started
it has isolated it. A launcher's variables say which of the ranks it is; in a process that the script starts itself
(`rank_starter`), torch.distributed says so after its first step.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TextIO, TypedDict

from flatout.environment import launched
from flatout.machine.ranks import joined_rank
from flatout.plan_choices import ChoiceValue
from flatout.script.entry import Target, execute
from flatout.script.process_end import call_at_end, call_before_exec, leave_at_once
from flatout.script.trial.hang_location import STACKS, dump_on_signal
from flatout.script.trial.isolated_child import Answer, becomes_another, ended_answer
from flatout.script.trial.session import Session

COMMANDS, ANSWERS = "commands-", "answers-"
"""Before the number of a rank: its pipes, in the folder of the trial."""
SETTINGS = "ranks.json"


class CommandedRank:
    """The process of one rank, as a session sees it."""

    torch_hooks: Sequence[Callable[[ModuleType], object]] = ()

    def __init__(self, folder: Path, number: Callable[[], int], target: Target) -> None:
        """number: which of the ranks it is, as far as that is known when it first answers."""
        self.target = target
        self._folder, self._number, self._owner = folder, number, os.getpid()
        self._ended = False
        self._error = ""

    # Their parent holds both ends of each pipe, so nobody who opens one waits.

    @cached_property
    def _commands(self) -> TextIO:
        return open(self._folder / f"{COMMANDS}{self._number()}", encoding="utf-8")

    @cached_property
    def _answers(self) -> TextIO:
        return open(self._folder / f"{ANSWERS}{self._number()}", "w", encoding="utf-8")

    def read(self) -> str:
        """The next command; '' where the parent has ended."""
        return self._commands.readline()

    def write(self, answer: Answer) -> None:
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()

    def guarded(self, callback: Callable[[], None]) -> Callable[[], None]:
        def call() -> None:
            try:
                callback()
            except Exception as error:
                traceback.print_exc()
                self.write({"event": "fault", "reason": f"{type(error).__name__}: {error}"})
                leave_at_once(1)

        return call

    def run(self, session: Session, end: Callable[[int], int] = lambda status: status) -> int:
        """The script, to its end; the exit status of the rank. end: what this process still does, given the script's
        status, and returns the rank's."""

        def becomes(command: str) -> None:
            if os.getpid() != self._owner:
                return
            if session.watch.steps:
                self._write_end(session, 0)
            else:
                self.write(becomes_another(self.target.name, command))
            leave_at_once(0)

        call_before_exec(becomes)
        status = execute(self.target, self._failed)
        if os.getpid() != self._owner:  # a process that the script has forked
            return status
        if self._error:
            # First, as this process is ended once another rank has learned of it and left.
            self._write_end(session, status)
            return end(status)
        status = end(status)
        self._write_end(session, status)
        return status

    def end(self, session: Session) -> None:
        """This process, which the script has started, ends: how, that process does not know. Safe to call twice, and
        from a forked child (where it does nothing)."""
        if self._ended or os.getpid() != self._owner:
            return
        self._ended = True
        with contextlib.suppress(OSError, ValueError):
            self._write_end(session, None)

    def _write_end(self, session: Session, status: int | None) -> None:
        if (found := session.ended()) is not None:
            self.write(found)
        watch = session.watch
        self.write(ended_answer(status, self._error, steps=watch.steps, script_steps=watch.finder.steps))

    def _failed(self, error: BaseException) -> None:
        self._error = "".join(traceback.format_exception(error))


class RankSettings(TypedDict):
    """What all ranks are told: levers and choices as in a TrialConfig, and the script's command."""

    levers: str
    choices: list[list[ChoiceValue]]
    target: list[str]


def follow(folder: Path) -> None:
    """Take commands in this process, which the script has started, or which is its own; torch has been imported."""
    settings, target = rank_settings(folder)
    child = CommandedRank(folder, joined_rank, target)
    session = Session(child, settings["levers"], settings["choices"], child.read)
    session.install_late(sys.modules["torch"])
    call_at_end(lambda: child.end(session))


def main(arguments: Sequence[str]) -> int:
    """arguments: the folder of the trial."""
    folder = Path(arguments[0])
    settings, target = rank_settings(folder)
    place = launched()
    assert place is not None
    dump_on_signal(folder / f"{STACKS}-{place[0]}")
    child = CommandedRank(folder, lambda: place[0], target)
    session = Session(child, settings["levers"], settings["choices"], child.read)
    session.install()
    return child.run(session)


def rank_settings(folder: Path) -> tuple[RankSettings, Target]:
    settings: RankSettings = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    return settings, Target.from_command(settings["target"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
