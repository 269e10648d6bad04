"""The process in which a run's determinism is checked: isolated like a trial, ended after some steps.

Started by `flatout.script.deterministic_check`, with a file of settings; one JSON line
goes back: digests of the weights, steps, the time of one, and the script's error where it failed.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from flatout.environment import inductor_folder
from flatout.errors import FlatoutError
from flatout.script.deterministic import make_deterministic, weights_digests
from flatout.script.runner import Runner
from flatout.script.trial.isolated_child import IsolatedChild


def main(config_path: str) -> NoReturn:
    config = json.loads(Path(config_path).read_text())
    child = IsolatedChild(config)
    child.isolate([inductor_folder()])
    child.on_torch([])
    if config["deterministic"]:
        make_deterministic()
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
            child.finish(found(None))

    runner.watch.at_boundary.append(stop_after_steps)
    runner.install()
    began = time.perf_counter()
    try:
        status = child.execute()
    except FlatoutError as error:
        child.finish({"event": "refused", "reason": str(error)})
    child.finish(found(status))


if __name__ == "__main__":
    main(sys.argv[1])
