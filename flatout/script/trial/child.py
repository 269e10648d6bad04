"""The process of one trial: isolate, seed, watch, run the script, obey the parent.

Started by `process`, or forked by `fork_server`, with a file of settings; it talks over two inherited pipes and writes
what the script prints to the log that it was given as stdout and stderr.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from flatout.errors import FlatoutError
from flatout.levers.lever import Lever, choices_from_json
from flatout.script.preloaded import Preloaded
from flatout.script.seeds import TrialSeeds
from flatout.script.trial.isolated_child import IsolatedChild
from flatout.script.trial.session import Session
from flatout.script.watch import Watch

MOST_ERROR_CHARACTERS = 8000


def main(config_path: str) -> NoReturn:
    config = json.loads(Path(config_path).read_text())
    begin(config, config["read_fd"], config["write_fd"])


def begin(config: dict[str, Any], read_fd: int, write_fd: int, preloaded: Preloaded | None = None) -> NoReturn:
    """preloaded: what a process that was forked has in memory; None in a new one."""
    child = IsolatedChild(config, write_fd)
    commands = os.fdopen(read_fd, "r")
    child.isolate([Path(path) for path in config["shared"]])
    child.write({"event": "isolated", **asdict(child.isolation)})
    levers = load_levers(config["levers"])
    watch = Watch()
    session = Session(watch, levers, choices_from_json(config["choices"], levers), commands.readline, child.write)
    on_torch: list[Any] = [watch.install, session.torch_imported, *child.torch_hooks]
    seeds = TrialSeeds(config["seed"], on_torch)
    session.unseeded = seeds.unseeded
    if preloaded is not None:
        preloaded.hide(child.target.folder, lambda reason: child.finish({"event": "alone", "reason": reason}))
    seeds.install()
    try:
        status = child.execute()
    except FlatoutError as error:
        status, child.error = 1, str(error)
    sys.stdout.flush()
    sys.stderr.flush()
    session.ended(status, child.error[-MOST_ERROR_CHARACTERS:], child.note)
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
