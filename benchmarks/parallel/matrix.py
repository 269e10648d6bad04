"""`python -m benchmarks.parallel.matrix`: do several ranks train what one process trains?

Nine models, each strategy, 2 and 4 ranks: 50 steps with the same global batches, ragged targets, clipping and a
schedule. The losses and the final parameters are compared with those of one process. How much rounding alone makes of
such a run is seen from runs of one process whose weights were moved by one rounding error before the first step: a cell
holds the largest difference over the largest of theirs, for the losses and for the parameters. 'alike' is at most 3 for
both, and the same samples in every batch; an empty cell has its reason. Ranks are on GPUs and talk by NCCL where each
has a GPU.

    python -m benchmarks.parallel.matrix --out matrix.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from benchmarks.parallel.models import CASES
from flatout.machine.detect import detect
from flatout.strategies.facts import STRATEGIES, strategies_of

NUDGES = 5
MOST = 3.0
"""Times what one rounding error at the start makes of a run: ranks round otherwise in every step."""
MODULE = "benchmarks.parallel.one_rank"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parallel.matrix", description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES))
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--out", type=Path, help="write everything measured there, as JSON")
    arguments = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        cells = _cells(Path(folder), arguments)
    document = {"benchmark": "parallel.matrix", "machine": detect().to_json(), "steps": arguments.steps, "cells": cells}
    if arguments.out:
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0 if all(cell.get("alike", True) for cell in cells) else 1


def _cells(folder: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    common = ["--models", *arguments.models, "--steps", str(arguments.steps)]
    alone = _run(folder / "alone", 1, common)
    nudged = [_run(folder / f"nudged-{seed}", 1, [*common, "--nudged", str(seed)]) for seed in range(1, NUDGES + 1)]
    noise = {
        name: tuple(map(max, zip(*(_differences(alone, one, name) for one in nudged), strict=True)))
        for name in arguments.models
    }
    cells = []
    for strategy in arguments.strategies:
        for ranks in arguments.ranks:
            if strategy not in strategies_of(ranks):
                continue
            found = _run(folder / f"{strategy}-{ranks}", ranks, [*common, "--strategy", strategy])
            for name in arguments.models:
                cell = {"model": name, "strategy": strategy, "ranks": ranks, **_cell(alone, found, name, noise[name])}
                cells.append(cell)
                print(_line(cell), flush=True)
    return cells


def _run(folder: Path, ranks: int, words: list[str]) -> Path:
    folder.mkdir()
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    done = subprocess.run(
        [sys.executable, *launcher, "-m", MODULE, *words, "--out", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{folder.name} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return folder


def _seen(folder: Path, name: str) -> dict[str, Any]:
    seen: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return seen


def _differences(one: Path, other: Path, name: str) -> tuple[float, float]:
    """The largest of the losses', and of the parameters'."""
    here, there = _seen(one, name)["losses"], _seen(other, name)["losses"]
    weights, others = (load_file(folder / f"{name}.safetensors") for folder in (one, other))
    return (
        max(abs(a - b) for a, b in zip(here, there, strict=True)),
        max(float((weights[key] - others[key]).abs().max()) for key in weights),
    )


def _cell(alone: Path, found: Path, name: str, noise: tuple[float, ...]) -> dict[str, Any]:
    seen = _seen(found, name)
    if "refused" in seen:
        return {"refused": seen["refused"]}
    loss, parameter = _differences(alone, found, name)
    same = seen["samples"] == _seen(alone, name)["samples"]
    ratios = [
        value / floor if floor else float(value > 0) for value, floor in zip((loss, parameter), noise, strict=True)
    ]
    return {
        "loss_difference": loss,
        "parameter_difference": parameter,
        "of_noise": ratios,
        "same_samples": same,
        "alike": same and max(ratios) <= MOST,
    }


def _line(cell: dict[str, Any]) -> str:
    head = f"{cell['model']:12} {cell['strategy']:9} {cell['ranks']} ranks  "
    if "refused" in cell:
        return f"{head}refused: {cell['refused']}"
    loss, parameter = cell["of_noise"]
    verdict = "alike" if cell["alike"] else "NOT ALIKE" if cell["same_samples"] else "OTHER SAMPLES"
    return f"{head}{verdict}: losses {loss:.2f}, parameters {parameter:.2f} times what rounding makes of them"


if __name__ == "__main__":
    sys.exit(main())
