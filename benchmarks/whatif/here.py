"""`python -m benchmarks.whatif.here`: steps predicted on this machine's CPU beside the same steps taken.

From the fp32 step of each small workload with its batch on all threads: bf16, one thread, half the batch and twice the
batch. Each prediction is made first, by a process that has never taken the other step.

    python -m benchmarks.whatif.here --out here.json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.infer.surroundings import surroundings
from benchmarks.whatif.workloads import WORKLOADS, Workload
from flatout import Plan, whatif
from flatout.statistics import median

STEP_SECONDS, STEPS = 1.5, 5


def measured(workload: Workload, plan: Plan, samples: int, threads: int) -> float:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        step, batch = workload.step(plan, "cpu"), workload.batch(samples)
        for _ in range(3):
            step(batch)
        taken: list[float] = []
        until = time.perf_counter() + STEP_SECONDS
        while len(taken) < STEPS or time.perf_counter() < until:
            began = time.perf_counter()
            step(batch)
            taken.append(time.perf_counter() - began)
        step.close()
    finally:
        torch.set_num_threads(before)
    return median(taken)


def rows_of(workload: Workload) -> list[dict[str, Any]]:
    threads, samples = torch.get_num_threads(), workload.samples
    rows = []
    for name, plan, count, on in (
        ("bf16", Plan(precision="bf16"), samples, threads),
        ("one thread", Plan(), samples, 1),
        ("half the batch", Plan(), samples // 2, threads),
        ("twice the batch", Plan(), 2 * samples, threads),
    ):
        step, batch = workload.step(Plan(), "cpu"), workload.batch(samples)
        changed = on if on != threads else None
        found = whatif(step, batch, devices=["cpu"], plan=plan, batch_size=count, threads=changed)["cpu"]
        step.close()
        if found.step_seconds is None:
            print(f"{workload.name:16} {name:16} unknown, because {found.reason}", flush=True)
            continue
        taken = measured(workload, plan, count, on)
        rows.append(
            {"workload": workload.name, "change": name, "predicted_seconds": found.step_seconds}
            | {"measured_seconds": taken, "error": found.step_seconds / taken - 1}
        )
        print(
            f"{workload.name:16} {name:16} predicted {found.step_seconds * 1e3:9.2f} ms  "
            f"measured {taken * 1e3:9.2f}  {found.step_seconds / taken - 1:+7.1%}",
            flush=True,
        )
    return rows


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.whatif.here", description=__doc__)
    parser.add_argument("--out", type=Path, help="write the predictions there, as JSON")
    parser.add_argument("--only", nargs="+", choices=[one.name for one in WORKLOADS if one.small])
    arguments = parser.parse_args(words)
    chosen = [one for one in WORKLOADS if one.small and (not arguments.only or one.name in arguments.only)]
    rows = [row for workload in chosen for row in rows_of(workload)]
    sizes = sorted(abs(row["error"]) for row in rows)
    errors = {"median": median(sizes), "nine in ten": sizes[int(0.9 * (len(sizes) - 1))], "largest": sizes[-1]}
    print(", ".join(f"{what} {number:.1%}" for what, number in errors.items()))
    if arguments.out:
        document = {"benchmark": "whatif.here", **surroundings(), "errors": errors, "steps": rows}
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
