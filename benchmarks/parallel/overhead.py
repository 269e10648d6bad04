"""`python -m benchmarks.parallel.overhead`: a step of TrainStep beside the same by hand, with the same ranks.

In every rank the contenders take turns, a window of steps each, in another order every round; the ranks go from window
to window together. A row is the ratio of paired windows (exact signed-rank interval, 95 %): above 1, the first one is
faster. Then weak scaling: what the same share of a batch takes on one rank and on all of them, one thread each.

    python -m benchmarks.parallel.overhead --ranks 2 --out overhead.json
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from benchmarks.parallel.contenders import CONTENDERS, PAIRS, model_of
from flatout.machine.detect import detect
from flatout.machine.ranks import ranks
from flatout.statistics import compare_paired, median

MODULE = "benchmarks.parallel.overhead"
WINDOW_SECONDS = 0.6
SAMPLES = 4
"""Of each rank's share."""


def windows(rounds: int, width: int, layers: int) -> dict[str, Any]:
    """On each rank: contender -> seconds a step, of each round."""
    torch.set_num_threads(1)
    here = ranks()
    if here.count == 1:  # what one rank takes: by hand, without others
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    generator = torch.Generator().manual_seed(here.rank)
    batch = torch.randint(512, (SAMPLES, 129), generator=generator)
    steps = {name: make(model_of(width, layers)) for name, make in CONTENDERS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    count = 0
    for step in steps.values():
        for _ in range(3):
            step(batch)
        began = time.perf_counter()
        for _ in range(3):
            step(batch)
        count = max(count, round(3 * WINDOW_SECONDS / (time.perf_counter() - began)))
    agreed = torch.tensor(max(2, count))
    distributed.broadcast(agreed, 0)
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(steps), len(steps)):
            distributed.barrier()
            began = time.perf_counter()
            for _ in range(int(agreed)):
                steps[name](batch)
            seconds[name].append((time.perf_counter() - began) / int(agreed))
    return {"seconds": seconds, "steps_in_a_window": int(agreed), "parameters": _parameters(width, layers)}


def _parameters(width: int, layers: int) -> int:
    return sum(one.numel() for one in model_of(width, layers).parameters())


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--out", type=Path, help="write everything measured there, as JSON")
    parser.add_argument("--in-rank", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    if arguments.in_rank is not None:
        found = windows(arguments.rounds, arguments.width, arguments.layers)
        if distributed.get_rank() == 0:
            arguments.in_rank.write_text(json.dumps(found))
        distributed.destroy_process_group()
        return 0
    measured = {count: _measured(arguments, count) for count in (1, arguments.ranks)}
    rows = _compared(measured[arguments.ranks]["seconds"])
    scaling = _scaling(measured[1]["seconds"], measured[arguments.ranks]["seconds"])
    document = {"benchmark": "parallel.overhead", "machine": detect().to_json(), "ranks": arguments.ranks}
    document |= {"rows": rows, "weak_scaling": scaling, "measured": measured}
    if arguments.out:
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0


def _measured(arguments: argparse.Namespace, count: int) -> dict[str, Any]:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(count)] if count > 1 else []
    sizes = ["--rounds", str(arguments.rounds), "--width", str(arguments.width), "--layers", str(arguments.layers)]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rank.json"
        command = [sys.executable, *launcher, "-m", MODULE, *sizes, "--in-rank", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{count} ranks ended with {done.returncode}:\n{done.stderr[-3000:]}")
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def _compared(seconds: dict[str, list[float]]) -> list[dict[str, Any]]:
    rows = []
    for one, other in PAIRS:
        if one not in seconds or other not in seconds:
            print(f"{one} beside {other}: not installed")
            continue
        found = compare_paired(seconds[other], seconds[one])
        rows.append({"one": one, "other": other, "comparison": found.to_json()})
        times = f"{median(seconds[one]) * 1e3:.1f} against {median(seconds[other]) * 1e3:.1f} ms"
        print(f"{one} beside {other}: x{found.ratio:.3f} ({found.low:.3f} to {found.high:.3f}), {times}", flush=True)
    return rows


def _scaling(alone: dict[str, list[float]], several: dict[str, list[float]]) -> dict[str, float]:
    """What of the time of one rank's step is left where all take one, in shares: 1 is perfect."""
    found = {name: median(alone[name]) / median(several[name]) for name in several if name in alone}
    for name, share in found.items():
        print(f"weak scaling, {name}: {share:.0%}")
    return found


if __name__ == "__main__":
    sys.exit(main())
