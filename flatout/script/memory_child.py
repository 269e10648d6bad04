"""The process in which `flatout memory` runs a script: isolated like a trial, watched for a few steps, then ended.

Started by `flatout.script.memory_trial`, with a file of settings; one JSON line goes back
through an inherited pipe. What the script prints goes to the files that it was given as stdout and stderr.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

from flatout.environment import inductor_folder
from flatout.errors import FlatoutError
from flatout.script.entry import Target, execute
from flatout.script.isolation import enter, explain_failure, guard_torch, kernel
from flatout.script.memory_watch import MemoryWatch
from flatout.script.patches import ImportWatch

_leave = os._exit


def main(config_path: str) -> NoReturn:
    config = json.loads(Path(config_path).read_text())
    kernel.die_with_parent(signal.SIGKILL)
    if os.getppid() != config["parent"]:
        _leave(1)  # interrupted while this process was being started
    answers = os.fdopen(config["write_fd"], "w")

    def finished(answer: dict[str, Any]) -> NoReturn:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        answers.write(json.dumps({**answer, "peak_resident_bytes": peak}) + "\n")
        answers.flush()
        _leave(0)

    try:
        isolation = enter(
            Path(config["scratch"]),
            (inductor_folder(),),  # torch makes it as soon as there is an optimizer
            config["isolation"],
            lambda description: finished({"event": "stopped", "reason": description}),
            allow_network=config["allow_network"],
        )
    except FlatoutError as error:
        finished({"event": "refused", "reason": str(error)})
    target = Target(**{**config["target"], "arguments": tuple(config["target"]["arguments"])})
    watch = MemoryWatch(steps=config["steps"], folder=users_folder(target), finished=finished)

    def torch_imported(torch: Any) -> None:
        if isolation.mode == "guard":
            guard_torch(torch)
        watch.torch_imported(torch)

    ImportWatch({"torch": torch_imported}).install()
    owner = os.getpid()

    def left_at_once(status: int) -> NoReturn:
        if os.getpid() != owner:  # a loader's worker ends so
            _leave(status)
        finished({**(watch.ended() or {"event": "no torch"}), "status": status & 255})

    os._exit = left_at_once
    show = sys.excepthook

    def explain(kind: Any, error: Any, trace: Any) -> None:
        show(kind, error, trace)
        note = explain_failure(error, isolation)
        if note:
            sys.stderr.write(f"{note}\n")

    sys.excepthook = explain
    try:
        status = execute(target)
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    except FlatoutError as error:
        finished({"event": "refused", "reason": str(error)})
    result = watch.ended()
    finished({**(result or {"event": "no torch"}), "status": status})


def users_folder(target: Target) -> str:
    """The folder whose lines count as the script's own: its own, and for a module the one where it is looked for."""
    return os.path.dirname(os.path.realpath(target.path)) if target.path is not None else os.getcwd()


if __name__ == "__main__":
    main(sys.argv[1])
