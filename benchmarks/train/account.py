"""`python -m benchmarks.train.account`: what the time of a training step is spent on, operator by operator.

GPT-2 124M, BERT-base and ResNet-50 as `flatout bench` trains them, in bf16: by the loop that peers run, and by
TrainStep with the levers that a tune keeps on a CPU with products of bf16 (without malloc, whose work is in no
operator). Operators are listed, the longest first, until 95 % of a step are accounted for; what remains is Python,
autograd and operators that take less each. Steps are timed without a profiler, operators with it, both in the same
process.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.infer.turns import versions, write
from flatout import Plan
from flatout.application.profile import ProfileResult, profile
from flatout.bench import training
from flatout.bench.training import BERT, GPT, RESNET, Training
from flatout.bench.workload import Setup

ACCOUNTED, LEAST = 0.95, 0.001
SETUP = Setup(device="cpu")
BF16 = {"kernels": "bf16", "loss": "chunked"}
CASES: dict[str, tuple[Training, dict[str, Any]]] = {
    "GPT-2 124M": (GPT, BF16),
    "BERT-base": (BERT, BF16),
    "ResNet-50": (RESNET, {"memory_format": "channels_last", "normalization": "fused"}),
}
"""With what a plan adds to bf16 and the fused optimizer."""


def by_hand(which: Training, chosen: dict[str, Any]) -> Callable[[], object]:
    settings = {"compiled": False, "channels_last": which.images}
    return training.by_hand(which, SETUP, settings).turn


def by_plan(which: Training, chosen: dict[str, Any]) -> Callable[[], object]:
    plan = Plan(precision="bf16", optimizer="fused", **chosen)
    return training.tuned(which, SETUP, {"plan": plan.to_toml()}).turn


LOOPS = {"by hand": by_hand, "flatout": by_plan}


def account(found: ProfileResult) -> dict[str, Any]:
    """The operators that make up 95 % of a step, and what share of it all operators together are."""
    step = found.profiled_step_seconds
    assert step is not None
    operators = found.operators_by("name")
    rows: list[dict[str, Any]] = []
    for one in operators:
        if one.seconds < LEAST * step or sum(row["seconds"] for row in rows) >= ACCOUNTED * step:
            break
        rows.append(
            {
                "operator": one.name,
                "class": one.operator_class,
                "calls": one.calls,
                "seconds": one.seconds,
                "share": one.seconds / step,
                "flops_per_second": one.flops / one.seconds if one.flops else None,
                "bytes_per_second": one.bytes / one.seconds if one.bytes else None,
            }
        )
    everything = sum(one.seconds for one in operators)
    return {"step_seconds": found.step_seconds, "profiled_seconds": step, "operators": everything / step, "rows": rows}


def shown(name: str, found: dict[str, Any]) -> str:
    lines = [f"{name}: {found['step_seconds']:.3f} s, operators {found['operators']:.1%} of it under the profiler"]
    for row in found["rows"]:
        flops, moved = row["flops_per_second"], row["bytes_per_second"]
        rate = f"{flops / 1e12:6.2f} TFLOP/s" if flops else f"{moved / 1e9:6.1f} GB/s" if moved else ""
        lines.append(f"  {row['share']:6.1%} {row['calls']:6.0f} x {row['operator']:44} {rate}")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train.account", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=sorted(CASES), default=list(CASES))
    parser.add_argument("--one", choices=sorted(LOOPS), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="write everything measured there, as JSON")
    arguments = parser.parse_args(words)
    if arguments.one:
        which, chosen = CASES[arguments.only[0]]
        print(json.dumps(account(profile(LOOPS[arguments.one](which, chosen), steps=3))))
        return 0
    results = {}
    for name, how in itertools.product(arguments.only, LOOPS):  # in a process each: a plan may change all of its own
        command = [sys.executable, "-m", "benchmarks.train.account", "--only", name, "--one", how]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        results[f"{name}, {how}"] = json.loads(done.stdout.splitlines()[-1])
        print(shown(f"{name}, {how}", results[f"{name}, {how}"]), flush=True)
        write(arguments.out, {"benchmark": "train.account", "versions": versions(), "results": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
