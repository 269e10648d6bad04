"""`python -m benchmarks.parallel.overhead`: a step of TrainStep beside the same by hand, with the same ranks.

Two contenders at a time, in ranks of their own: in every rank they take turns, a window of steps each, in another order
every round; the ranks go from window to window together. That is done with new ranks several times, as one start is
faster than another by some per cent. A row is the ratio of all paired windows (exact signed-rank interval, 95 %): above
1, the first one is faster. Then weak scaling: what the same share of a batch takes on one rank and on all of them, one
thread each.

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


def windows(names: Sequence[str], rounds: int, width: int, layers: int) -> dict[str, Any]:
    """On each rank: contender -> seconds a step, of each round."""
    torch.set_num_threads(1)
    here = ranks()
    if here.count == 1:  # what one rank takes: by hand, without others
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    generator = torch.Generator().manual_seed(here.rank)
    batch = torch.randint(512, (SAMPLES, 129), generator=generator)
    steps = {name: make(model_of(width, layers)) for name, make in CONTENDERS.items() if name in names}
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
    parser.add_argument("--rounds", type=int, default=24, help="of each start")
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--out", type=Path, help="write everything measured there, as JSON")
    parser.add_argument("--in-rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--names", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    if arguments.in_rank is not None:
        found = windows(arguments.names, arguments.rounds, arguments.width, arguments.layers)
        if distributed.get_rank() == 0:
            arguments.in_rank.write_text(json.dumps(found))
        distributed.destroy_process_group()
        return 0
    rows, measured = [], []
    for one, other in PAIRS:
        if one not in CONTENDERS or other not in CONTENDERS:
            print(f"{one} beside {other}: not installed")
            continue
        found = [_measured(arguments, arguments.ranks, (one, other)) for _ in range(arguments.starts)]
        alone = _measured(arguments, 1, (one, other))
        rows.append(_compared(one, other, [start["seconds"] for start in found], alone["seconds"]))
        measured.append({"ranks": found, "alone": alone})
    document = {"benchmark": "parallel.overhead", "machine": detect().to_json(), "ranks": arguments.ranks}
    if arguments.out:
        arguments.out.write_text(json.dumps({**document, "rows": rows, "measured": measured}, indent=1) + "\n")
    return 0


def _measured(arguments: argparse.Namespace, count: int, names: Sequence[str]) -> dict[str, Any]:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(count)] if count > 1 else []
    sizes = ["--rounds", str(arguments.rounds), "--width", str(arguments.width), "--layers", str(arguments.layers)]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rank.json"
        command = [sys.executable, *launcher, "-m", MODULE, *sizes, "--in-rank", str(out), "--names", *names]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{count} ranks ended with {done.returncode}:\n{done.stderr[-3000:]}")
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def _compared(
    one: str, other: str, starts: list[dict[str, list[float]]], alone: dict[str, list[float]]
) -> dict[str, Any]:
    """`weak_scaling`: what of the speed of one rank is left where all train, as a share."""
    seconds = {name: [window for start in starts for window in start[name]] for name in (one, other)}
    found = compare_paired(seconds[other], seconds[one])
    scaling = {name: median(alone[name]) / median(seconds[name]) for name in (one, other)}
    by_start = [compare_paired(start[other], start[one]).ratio for start in starts]
    times = f"{median(seconds[one]) * 1e3:.1f} against {median(seconds[other]) * 1e3:.1f} ms"
    shares = " and ".join(f"{share:.0%}" for share in scaling.values())
    bounds = f"({found.low:.3f} to {found.high:.3f}; {', '.join(f'{ratio:.3f}' for ratio in by_start)})"
    print(f"{one} beside {other}: x{found.ratio:.3f} {bounds}, {times}; weak scaling {shares}", flush=True)
    comparison = {"comparison": found.to_json(), "of_each_start": by_start}
    return {"one": one, "other": other, **comparison, "weak_scaling": scaling}


if __name__ == "__main__":
    sys.exit(main())
