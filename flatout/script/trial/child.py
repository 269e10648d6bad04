"""The process of one trial, started by `process` or forked by `fork_server` with a file of settings.

What the script prints goes to the log that it was given as stdout and stderr.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from flatout.script.determinism_watch import DeterminismWatch
from flatout.script.preloaded import Preloaded
from flatout.script.trial.forking import ForkPoint
from flatout.script.trial.hang_location import STACKS, dump_on_signal
from flatout.script.trial.isolated_child import IsolatedChild, Observer
from flatout.script.trial.messages import Command, TrialConfig
from flatout.script.trial.session import Session, Turn

SCRIPT = "script"
"""The name of the script's own process among those that train."""


def main(config_path: str, *descriptors: str) -> NoReturn:
    config: TrialConfig = json.loads(Path(config_path).read_text())
    begin(config, [int(one) for one in descriptors])


def begin(config: TrialConfig, descriptors: Sequence[int], preloaded: Preloaded | None = None) -> NoReturn:
    """descriptors: of the commands, of the answers, and perhaps of the socket that brings those of trials that are
    forked from this one. preloaded: the modules in memory of a forked process; None in a new one."""
    read_fd, write_fd, *forks = descriptors
    child = IsolatedChild(config, write_fd)
    commands = os.fdopen(read_fd, "r")
    child.isolate()
    dump_on_signal(Path(config["scratch"]) / STACKS)
    command = config["command"]
    observer: Observer
    if command is None:
        point = ForkPoint(child, read_fd, forks[0] if forks else None)
        turn = Turn(Path(config["turns"]))
        observer = Session(child, config["levers"], config["choices"], commands.readline, point, turn)
    elif command["do"] in ("memory", "profile"):
        observer = _observer_of_ranks(child, command)
    else:
        observer = DeterminismWatch(child, steps=command["steps"], deterministic=command["deterministic"])
    if preloaded is not None:
        preloaded.hide(child.target.folder, lambda reason: child.finish({"event": "alone", "reason": reason}))
    child.run(observer)


def _observer_of_ranks(child: IsolatedChild, command: Command) -> Observer:
    """Of this process, and of those that the script starts to train in."""
    from flatout.script.following import follow_children
    from flatout.script.rank_answers import RankAnswers
    from flatout.script.watched_rank import ScriptsProcess

    folder = Path(command["ranks"])
    follow_children(folder)
    return ScriptsProcess(child, RankAnswers(folder, SCRIPT), command).observer


if __name__ == "__main__":
    main(*sys.argv[1:])
