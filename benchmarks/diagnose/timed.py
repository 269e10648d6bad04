"""`python timed.py SCRIPT FILE`: run a script as it is, and write down when its optimizers had stepped, as JSON."""

from __future__ import annotations

import json
import runpy
import sys
import time
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


def main(script: str, out: Path) -> None:
    ends: list[float] = []
    register_optimizer_step_post_hook(lambda *_: ends.append(time.perf_counter()))
    sys.argv = [script]
    sys.path[0] = str(Path(script).parent)
    began = time.perf_counter()
    runpy.run_path(script, run_name="__main__")
    if torch.cuda.is_initialized() and ends:
        torch.cuda.synchronize()
        ends[-1] = time.perf_counter()
    out.write_text(json.dumps({"seconds": time.perf_counter() - began, "steps": len(ends), "ends": ends}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
