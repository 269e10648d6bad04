"""`python -m benchmarks.train`: a step of the library beside a hand-written loop and the peers that are installed.

Contenders take turns in one process, a window of steps each, in another order every round; a row is the median of its
windows' medians, and the ratio is that of paired windows (exact signed-rank interval, 95 %).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.train.contenders import CONTENDERS, Run
from benchmarks.train.workloads import Workload, workloads
from flatout import batches
from flatout.machine.detect import detect
from flatout.statistics import compare_paired, median

WINDOW_SECONDS = 0.4
PEERS = ("accelerate", "lightning", "transformers")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train", description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--only", nargs="+", help="names of workloads, or prefixes of them")
    parser.add_argument("--out", type=Path, help="write everything measured there, as JSON")
    arguments = parser.parse_args(words)
    results = []
    for workload in workloads():
        if arguments.only and not any(workload.name.lower().startswith(name.lower()) for name in arguments.only):
            continue
        results.append(_measure(workload, arguments.rounds))
    loading = _loading(arguments.rounds)
    if arguments.out:
        document = {"benchmark": "train", "machine": detect().to_json(), "peers": _versions(), "loading": loading}
        arguments.out.write_text(json.dumps({**document, "results": results}, indent=1) + "\n")
    return 0


def _measure(workload: Workload, rounds: int) -> dict[str, Any]:
    runs: dict[str, Run] = {}
    for name, make in CONTENDERS.items():
        try:
            runs[name] = make(workload)
        except ImportError as error:
            print(f"  {name}: not installed ({error})")
    usual = median(runs["by hand"](30)[10:])
    steps = max(12, int(WINDOW_SECONDS / usual))
    windows: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 1):
        for name in random.sample(list(runs), len(runs)):
            seconds = runs[name](steps)
            if turn:  # the first round warms up
                windows[name].append(median(seconds[2:]))
    print(f"{workload.name} ({rounds} windows of {steps} steps each)")
    rows = {}
    for name, found in windows.items():
        ratio = compare_paired(windows["by hand"], found)
        rows[name] = {"median_seconds": median(found), "windows": found, "against_by_hand": asdict(ratio)}
        print(
            f"  {name:22} {median(found) * 1e6:9.0f} µs   x{ratio.ratio:.2f} ({ratio.low:.2f} to {ratio.high:.2f})",
            flush=True,
        )
    same = compare_paired(windows["by hand, our batches"], windows["flatout"])
    print(
        f"  the step itself, same batches: {1 / same.ratio:.3f} of by hand ({1 / same.high:.3f} to {1 / same.low:.3f})"
    )
    return {"workload": workload.name, "steps": steps, "rows": rows, "step_against_by_hand": asdict(same)}


def _loading(rounds: int) -> dict[str, Any]:
    """Samples a second of in-memory batches, ours against a DataLoader's."""
    inputs, targets = torch.randn(12_800, 784), torch.randint(0, 10, (12_800,))
    ours, theirs = batches((inputs, targets), 64), DataLoader(TensorDataset(inputs, targets), 64, shuffle=True)
    seconds: dict[str, list[float]] = {"flatout": [], "DataLoader": []}
    for _ in range(rounds):
        for name, source in (("flatout", ours), ("DataLoader", theirs)):
            start = time.perf_counter()
            for _ in source:
                pass
            seconds[name].append(time.perf_counter() - start)
    found = compare_paired(seconds["DataLoader"], seconds["flatout"])
    rates = {name: 12_800 / median(times) for name, times in seconds.items()}
    print(
        f"in-memory batches of 64 x 784: {rates['flatout']:,.0f} samples/s against {rates['DataLoader']:,.0f}: "
        f"x{found.ratio:.1f} ({found.low:.1f} to {found.high:.1f})"
    )
    return {"samples_per_second": rates, "comparison": asdict(found)}


def _versions() -> dict[str, str]:
    installed = {}
    for name in PEERS:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed[name] = "not installed"
    return installed


if __name__ == "__main__":
    sys.exit(main())
