"""The process in which a run's determinism is checked: isolated like a trial, ended after some steps.

Started by `flatout.script.deterministic_check`, with a file of settings; one JSON line
goes back: digests of the weights, steps, the time of one, and the script's error where it failed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from flatout.environment import inductor_folder
from flatout.errors import FlatoutError
from flatout.script.deterministic import make_deterministic, weights_digests
from flatout.script.entry import Target, execute
from flatout.script.isolation import enter, guard_torch, kernel
from flatout.script.patches import ImportWatch
from flatout.script.runner import Runner

_leave = os._exit


def _guard(torch: ModuleType) -> None:
    guard_torch(torch)


def main(config_path: str) -> NoReturn:
    config = json.loads(Path(config_path).read_text())
    kernel.die_with_parent(signal.SIGKILL)
    if os.getppid() != config["parent"]:
        _leave(1)  # interrupted while this process was being started
    answers = os.fdopen(config["write_fd"], "w")

    def finished(answer: dict[str, Any]) -> NoReturn:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        _leave(0)

    try:
        isolation = enter(
            Path(config["scratch"]),
            (inductor_folder(),),
            config["isolation"],
            lambda description: finished({"event": "stopped", "reason": description}),
            allow_network=config["allow_network"],
        )
    except FlatoutError as error:
        finished({"event": "refused", "reason": str(error)})
    if isolation.mode == "guard":
        ImportWatch({"torch": _guard}).install()
    if config["deterministic"]:
        make_deterministic()
    target = Target(**{**config["target"], "arguments": tuple(config["target"]["arguments"])})
    runner = Runner()

    def found(status: int | None) -> dict[str, Any]:
        error = getattr(sys, "last_value", None) if status else None
        return {
            "event": "ended",
            "status": status,
            "steps": runner.watch.finder.steps,
            "seconds": time.perf_counter() - began,
            "step_seconds": runner.record.median_seconds,
            "weights": weights_digests(runner.watch.subject) if "torch" in sys.modules else [],
            "error": None if error is None else f"{type(error).__name__}: {str(error).strip().splitlines()[0]}",
        }

    def stop_after_steps() -> None:
        if runner.watch.finder.steps >= config["steps"]:
            finished(found(None))

    runner.watch.at_boundary.append(stop_after_steps)
    runner.install()
    began = time.perf_counter()
    try:
        status = execute(target)
    except FlatoutError as error:
        finished({"event": "refused", "reason": str(error)})
    finished(found(status))


if __name__ == "__main__":
    main(sys.argv[1])
