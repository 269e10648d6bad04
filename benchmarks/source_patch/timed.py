"""A training script, plain or under `flatout run`, that notes when its steps end and which losses it has.

    python -m benchmarks.source_patch.timed SETTINGS.json --steps N --times FILE

SETTINGS: {"words": the script and its arguments, "plan": a path or null, "ends": "step" or "zero_grad"}. With
"losses": a path, the losses of N steps are written there, and nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


class Steps:
    """Ends the process after so many steps."""

    def __init__(self, count: int, times: Path, losses: Path | None) -> None:
        self._count, self._times, self._losses_file = count, times, losses
        self._ends: list[float] = []
        self._losses: list[float] = []

    def ended(self, *_: object) -> None:
        if not self._ends:
            self._times.touch()
        self._ends.append(time.perf_counter())
        if len(self._ends) <= self._count:
            return
        self._times.write_text(json.dumps(self._ends))
        if self._losses_file is not None:
            self._losses_file.write_text(json.dumps(self._losses))
        os._exit(0)

    def watched(self, backward: Callable[..., None]) -> Callable[..., None]:
        def noted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            self._losses.append(float(tensor.detach()))
            backward(tensor, *args, **kwargs)

        return noted


def install(settings: dict[str, Any], steps: Steps) -> None:
    if settings["ends"] == "zero_grad":
        plain = torch.nn.Module.zero_grad

        def zero_grad(module: torch.nn.Module, set_to_none: bool = True) -> None:
            plain(module, set_to_none)
            steps.ended()

        torch.nn.Module.zero_grad = zero_grad  # type: ignore[method-assign]
    else:
        register_optimizer_step_post_hook(steps.ended)
    if settings.get("losses"):
        torch.Tensor.backward = steps.watched(torch.Tensor.backward)  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--times", type=Path, required=True)
    arguments = parser.parse_args()
    settings = json.loads(arguments.settings.read_text())
    losses = settings.get("losses")
    install(settings, Steps(arguments.steps, arguments.times, Path(losses) if losses else None))
    words = settings["words"]
    if settings["plan"]:
        import flatout.cli.run

        options = ["--plan", settings["plan"], "--trust-plan", "--no-report", "--quiet"]
        sys.exit(flatout.cli.run.main([*options, *words]))
    sys.argv = list(words)
    sys.path[0] = os.path.dirname(os.path.realpath(words[0]))
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
