"""Training in processes that the script starts: each is watched by itself, and keeps its record in the run's folder.

    follow_children(folder)     # in `flatout run`, before the script: Python processes started from now on inherit it
    plan_children(folder, choices, loop)    # and train by these choices, where they train that loop
    follow()                    # in such a process, when it makes its first optimizer: see child_hook/sitecustomize.py
    record_file.read_records(folder)    # in `flatout run`, when the script has ended

A process that makes no optimizer (a loader's worker, a launcher) only waits for torch to be imported.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TypedDict

from flatout import environment
from flatout.levers.lever import Choice, choices_from_json
from flatout.plan_choices import ChoiceValue
from flatout.script import child_hook
from flatout.script.child_hook.sitecustomize import when_first_optimizer
from flatout.script.own_modules import own_imports
from flatout.script.patches import ImportWatch, Patches
from flatout.script.process_end import call_at_end
from flatout.script.runner import Runner
from flatout.tracebacks import leave_no_frame

WATCHED, COMMANDED = "watched.json", "ranks.json"
"""The settings of ranks whose time or memory is watched, and of ranks that take commands: see rank_answers and
trial/commanded_rank, which a run does not import."""
PLAN = "plan.json"
"""What those processes of a run train by."""


def follow_children(folder: Path) -> None:
    """Let Python processes that are started from now on, and forks of this one, keep their records there."""
    hook = os.path.dirname(child_hook.__file__)
    environment.follow_children(hook, str(folder))
    _with_environments_of_their_own(hook, str(folder))
    owner = os.getpid()

    def forked() -> None:
        if os.getppid() == owner:  # a fork of a fork has inherited what the first one set up
            follow_here(folder)

    os.register_at_fork(after_in_child=forked)


def plan_children(folder: Path, choices: Sequence[Choice], loop: str) -> None:
    """Let them train by these choices where they train `loop` (`Observed.loop`); by those that may be switched on after
    a first step."""
    told: _Planned = {"choices": [one.to_json() for one in choices if one.lever.switch == "live"], "loop": loop}
    (folder / PLAN).write_text(json.dumps(told), encoding="utf-8")


class _Planned(TypedDict):
    choices: list[list[ChoiceValue]]
    loop: str


def _planned_runner(folder: Path) -> Runner:
    try:
        told: _Planned = json.loads((folder / PLAN).read_text(encoding="utf-8"))
    except OSError:
        return Runner()
    from flatout.levers.catalogue import LEVERS
    from flatout.machine.detect import detect

    return Runner(choices_from_json(told["choices"], LEVERS), detect(), only_for=told["loop"])


def _with_environments_of_their_own(hook: str, folder: str) -> None:
    """Follow processes that are given their environment, such as the ranks of torchrun and of accelerate."""

    def passing_on(original: Callable[..., object]) -> Callable[..., object]:
        def __init__(*args: object, **kwargs: object) -> None:
            given = kwargs.get("env")
            if isinstance(given, Mapping) and all(isinstance(name, str) for name in given):
                kwargs["env"] = environment.with_following(given, hook, folder)
            try:
                original(*args, **kwargs)
            except BaseException as error:
                leave_no_frame(error)
                raise

        return __init__

    Patches().replace(subprocess.Popen, "__init__", passing_on)


def follow_here(folder: Path) -> None:
    """Follow this process too, once it begins to train."""

    def imported(torch: ModuleType) -> None:
        when_first_optimizer(lambda: _follow_into(folder))

    ImportWatch({"torch": imported}).install()


def follow() -> None:
    """Watch this process, as `flatout run` watches the script."""
    folder = environment.followed_into()
    if folder is not None:
        _follow_into(Path(folder))


def _follow_into(folder: Path) -> None:
    """As a run or, where the folder says so, as part of a trial. No error in here reaches the script."""
    with own_imports():
        if (folder / WATCHED).exists():
            from flatout.script.watched_rank import WatchedRank

            WatchedRank(folder)
        elif (folder / COMMANDED).exists():
            from flatout.script.trial.commanded_rank import follow as take_commands

            take_commands(folder)
        else:
            from flatout.script.record_file import RecordFile  # here: every run imports this module

            runner = _planned_runner(folder)
            record = RecordFile(folder, str(os.getpid()), runner)
            runner.install()
            call_at_end(record.end)
