"""The process of one trial: isolate, seed, watch, run the script, obey the parent.

Started by `flatout.tuning.trial_process`, or forked by `flatout.script.fork_server`, with a file of settings; it talks
over two inherited pipes and writes what the script prints to the log that it was given as stdout and stderr.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from flatout.errors import FlatoutError
from flatout.levers.lever import Lever, choices_from_json
from flatout.script.entry import Target, execute
from flatout.script.isolation import Isolation, enter, explain_failure, guard_torch, kernel
from flatout.script.preloaded import Preloaded
from flatout.script.seeds import TrialSeeds
from flatout.script.session import Session
from flatout.script.watch import Watch


def main(config_path: str) -> NoReturn:
    config = json.loads(Path(config_path).read_text())
    begin(config, config["read_fd"], config["write_fd"])


def begin(config: dict[str, Any], read_fd: int, write_fd: int, preloaded: Preloaded | None = None) -> NoReturn:
    """preloaded: what a process that was forked has in memory; None in a new one."""
    kernel.die_with_parent(signal.SIGKILL)
    if os.getppid() != config["parent"]:
        os._exit(1)  # killed while this process was being started
    commands = os.fdopen(read_fd, "r")
    answers = os.fdopen(write_fd, "w")

    def write(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    def first_write(description: str) -> NoReturn:
        write({"event": "stopped", "reason": description})
        os._exit(0)

    def not_forked(reason: str) -> NoReturn:
        write({"event": "alone", "reason": reason})
        os._exit(0)

    try:
        isolation = enter(
            Path(config["scratch"]),
            [Path(p) for p in config["shared"]],
            config["isolation"],
            first_write,
            allow_network=config["allow_network"],
        )
    except FlatoutError as error:
        write({"event": "refused", "reason": str(error)})
        os._exit(1)
    write({"event": "isolated", **asdict(isolation)})
    levers = load_levers(config["levers"])
    watch = Watch()
    session = Session(watch, levers, choices_from_json(config["choices"], levers), commands.readline, write)
    on_torch: list[Any] = [watch.install, session.torch_imported]
    if isolation.mode == "guard":
        on_torch.append(guard_torch)
    seeds = TrialSeeds(config["seed"], on_torch)
    session.unseeded = seeds.unseeded
    target = Target(**{**config["target"], "arguments": tuple(config["target"]["arguments"])})
    if preloaded is not None:
        preloaded.hide(target.folder, not_forked)
    seeds.install()
    _run(target, session, isolation)


def _run(target: Target, session: Session, isolation: Isolation) -> NoReturn:
    failure: list[str] = []
    note = ""

    def remember(kind: Any, error: Any, trace: Any) -> None:
        nonlocal note
        note = explain_failure(error, isolation)
        text = "".join(traceback.format_exception(kind, error, trace))
        failure.append(text)
        sys.stderr.write(text)

    sys.excepthook = remember
    try:
        status = execute(target)
    except KeyboardInterrupt:
        status = 130
    except FlatoutError as error:
        status = 1
        failure.append(str(error))
    sys.stdout.flush()
    sys.stderr.flush()
    session.ended(status, "".join(failure)[-8000:], note)
    os._exit(0)


def load_levers(source: str) -> Sequence[Lever]:
    """'package.module:NAME' or 'path/to/file.py:NAME'."""
    place, _, name = source.rpartition(":")
    if place.endswith(".py"):
        spec = importlib.util.spec_from_file_location("flatout_levers_from_file", place)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    return getattr(module, name)


if __name__ == "__main__":
    main(sys.argv[1])
