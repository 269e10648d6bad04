"""`python -m benchmarks.parallel.planning`: planned steps beside those torchtitan published.

Two constants are taken from published rows: which share of the peak the products of Llama reach, eager and compiled,
each from its row on 8 GPUs. These rows are labelled 'fitted'; the others are the test. Everything else is published:
see published_runs.py. Errors are planned / published - 1. Memory is a sum of tensors, and published as reserved.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.parallel.estimates import Estimate, estimate
from benchmarks.parallel.published_runs import RUNS, SOURCES, Run, grand_teton, workload
from flatout import __version__

TOKENS = 8192


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write all as JSON")
    out = parser.parse_args().out
    found = planned()
    print(published_text(found["published"]))
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n")


def planned() -> dict[str, Any]:
    efficiencies = fitted_efficiencies()
    return {
        "benchmark": "parallel.planning",
        "flatout": __version__,
        "sources": SOURCES,
        "efficiencies": efficiencies,
        "published": [row(run, efficiencies) for run in RUNS],
    }


def fitted_efficiencies() -> dict[str, float]:
    """Of the fitted rows: the share of the peak with which the plan takes as long as was published."""
    return {_mode(run): _efficiency(run) for run in RUNS if run.fitted}


def _efficiency(run: Run) -> float:
    low, high = 0.01, 1.0
    for _ in range(60):  # bisection: a plan is the faster, the more the products reach
        middle = (low + high) / 2
        faster = tokens_per_second(run, plan(run, middle)) > run.tokens_per_second
        low, high = (low, middle) if faster else (middle, high)
    return low


def plan(run: Run, efficiency: float) -> Estimate:
    cluster = grand_teton(run.gpus, efficiency=efficiency)
    batch_size = run.samples_per_replica * run.gpus // run.tensor_ranks
    work = workload(run.model, length=TOKENS, checkpointing=run.checkpointing)
    return estimate(work, cluster, batch_size, run.sharing, tensor_ranks=run.tensor_ranks)


def tokens_per_second(run: Run, found: Estimate) -> float:
    """Of one GPU."""
    return found.samples_per_second * TOKENS / run.gpus


def row(run: Run, efficiencies: dict[str, float]) -> dict[str, Any]:
    about = {
        "source": run.source,
        "model": run.model.name,
        "gpus": run.gpus,
        "how": _how(run),
        "published": {"tokens_per_second": run.tokens_per_second, "memory_gib": run.memory_gib},
    }
    if run.not_predicted:
        return {**about, "label": "not predicted", "reason": run.not_predicted}
    found = plan(run, efficiencies[_mode(run)])
    ours = tokens_per_second(run, found)
    gib = found.peak_bytes / 2**30
    return {
        **about,
        "label": "fitted" if run.fitted else "test",
        "planned": {"tokens_per_second": ours, "memory_gib": gib, "estimate": found.to_json()},
        "errors": {
            "tokens_per_second": ours / run.tokens_per_second - 1,
            "memory": None if run.memory_gib is None else gib / run.memory_gib - 1,
        },
    }


def published_text(rows: list[dict[str, Any]]) -> str:
    lines = [
        f"{'':17}{'':16}{'':5}{'':46}{'tokens/s a GPU':^26}{'GiB':^22}",
        f"{'source':17}{'model':16}{'GPUs':>4} {'how':46}{'publ.':>8}{'planned':>9}{'error':>9}"
        f"{'publ.':>7}{'planned':>8}{'error':>7}  label",
    ]
    for one in rows:
        start = f"{one['source']:17}{one['model']:16}{one['gpus']:4} {one['how']:46}"
        start += f"{one['published']['tokens_per_second']:8.0f}"
        if "planned" not in one:
            lines.append(f"{start}  {one['label']}: {one['reason']}")
            continue
        errors, gib = one["errors"], one["published"]["memory_gib"]
        text = f"{start}{one['planned']['tokens_per_second']:9.0f}{errors['tokens_per_second']:+9.1%}"
        text += f"{gib or 'n/a':>7}{one['planned']['memory_gib']:8.1f}"
        text += f"{errors['memory']:+7.1%}" if errors["memory"] is not None else f"{'':7}"
        lines.append(f"{text}  {one['label']}")
    tests = [one for one in rows if one["label"] == "test"]
    largest = max(abs(one["errors"]["tokens_per_second"]) for one in tests)
    memory = max(abs(one["errors"]["memory"]) for one in rows if one.get("errors", {}).get("memory") is not None)
    lines.append(f"largest error in tokens/s: {largest:.1%} of {len(tests)} tests")
    lines.append(
        f"largest error in memory: {memory:.1%}; nothing was fitted to it (planned: tensors; published: reserved)"
    )
    return "\n".join(lines)


def _how(run: Run) -> str:
    parts = [
        f"fsdp {run.gpus // run.tensor_ranks}",
        *([f"x tensor {run.tensor_ranks}"] if run.tensor_ranks > 1 else []),
        "async" if run.async_tensor_parallel else "",
        "compiled" if run.compiled else "eager",
        run.precision,
        f"{run.checkpointing} AC",
    ]
    return " ".join(part for part in parts if part)


def _mode(run: Run) -> str:
    return "compiled" if run.compiled else "eager"


if __name__ == "__main__":
    main()
