"""The process in which `flatout memory` runs a script: isolated like a trial, watched for a few steps, then ended.

Started by `flatout.script.memory_trial`, with a file of settings; one JSON line goes back
through an inherited pipe. What the script prints goes to the files that it was given as stdout and stderr.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any, NoReturn

from flatout.environment import inductor_folder
from flatout.errors import FlatoutError
from flatout.script.entry import Target
from flatout.script.memory_watch import MemoryWatch
from flatout.script.trial.isolated_child import IsolatedChild

_leave = os._exit


def main(config_path: str) -> NoReturn:
    config = json.loads(Path(config_path).read_text())
    child = IsolatedChild(config)
    child.isolate([inductor_folder()])  # torch makes it as soon as there is an optimizer

    def finished(answer: dict[str, Any]) -> NoReturn:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        child.finish({**answer, "peak_resident_bytes": peak})

    watch = MemoryWatch(steps=config["steps"], folder=users_folder(child.target), finished=finished)
    child.on_torch([watch.torch_imported])

    def ended(status: int) -> NoReturn:
        finished({**(watch.ended() or {"event": "no torch"}), "status": status})

    owner = os.getpid()

    def left_at_once(status: int) -> NoReturn:
        if os.getpid() != owner:  # a loader's worker ends so
            _leave(status)
        ended(status & 255)

    os._exit = left_at_once
    try:
        status = child.execute()
    except FlatoutError as error:
        finished({"event": "refused", "reason": str(error)})
    if child.note:
        sys.stderr.write(f"{child.note}\n")
    ended(status)


def users_folder(target: Target) -> str:
    """The folder whose lines count as the script's own: its own, and for a module the one where it is looked for."""
    return os.path.dirname(os.path.realpath(target.path)) if target.path is not None else os.getcwd()


if __name__ == "__main__":
    main(sys.argv[1])
