"""`python -m benchmarks.parallel.memory`: what a rank was forecast to hold, beside what it holds.

The library's models at the sizes of benchmarks.memory, AdamW, each strategy, 2 and 4 ranks. The forecast is made in one
process, before there are ranks. Measured is the most that torch's CPU allocator held in a step, of the rank that held
most: the tensors that are alive when the step begins, and how far torch's profiler saw it rise within the step. The
profiler misses what gloo's own threads free, which only adds to what it reports: the least of the steps is taken.
Errors are forecast / measured - 1.

    python -m benchmarks.parallel.memory --out memory.json
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.profiler import ProfilerActivity, profile, record_function

import flatout
from benchmarks.memory.cases import Subject
from benchmarks.memory.cases_library import library_cases
from flatout.machine.detect import detect
from flatout.statistics import median
from flatout.units import format_bytes

STRATEGIES = ("ddp", "zero1", "fsdp")
MODULE = "benchmarks.parallel.memory"
STEPS = 7
FIRST_STEADY = 2
"""Optimizer state is there from the second step on, DDP's buckets too."""
WITH_BATCH_NORM = ("ResNet",)


def subjects() -> dict[str, Subject]:
    return {one.subject.name: one.subject for one in library_cases() if one.subject.name not in WITH_BATCH_NORM}


def train_step(subject: Subject, kind: Any) -> flatout.TrainStep:  # kind: as Plan takes it
    model = subject.make()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    return flatout.TrainStep(model, optimizer, subject.loss_fn, flatout.Plan(parallel=kind))


def measured_bytes(subject: Subject, kind: str, samples: int) -> int:
    """Of this rank."""
    torch.manual_seed(0)
    alive = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step = train_step(subject, kind)
        batch = subject.batch(samples)
        for number in range(STEPS):
            alive.append(_alive_bytes(step))
            with record_function(f"step {number}"):
                step(batch)
    events = profiler.profiler.kineto_results.events()
    spans = {e.name(): (e.start_ns(), e.start_ns() + e.duration_ns()) for e in events if e.name().startswith("step ")}
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    peaks = []
    for number in range(FIRST_STEADY, STEPS):
        begin, end = spans[f"step {number}"]
        rise = most = 0
        for when, size in changes:
            if begin <= when <= end:
                rise += size
                most = max(most, rise)
        peaks.append(alive[number] + most)
    step.close()
    return min(peaks)


def _alive_bytes(step: flatout.TrainStep) -> int:
    gc.collect()
    storages = {}
    gradients = [one.grad for one in step.model.parameters()]  # DDP's buckets, which no other tensor shows
    for one in (*gradients, *gc.get_objects()):
        if isinstance(one, Tensor):
            local = one.to_local() if hasattr(one, "to_local") else one
            storage = local.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def in_rank(out: Path, kind: str, samples: int, names: list[str]) -> None:
    torch.set_num_threads(1)
    here = flatout.ranks()
    found = {}
    for name in names:
        every: list[Any] = [None] * here.count
        distributed.all_gather_object(every, measured_bytes(subjects()[name], kind, samples))
        found[name] = every
    if here.first:
        out.write_text(json.dumps(found))


def main(words: Sequence[str] | None = None) -> int:
    known = subjects()
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(known), choices=list(known))
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=STRATEGIES)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--samples", type=int, default=8, help="of each rank's share")
    parser.add_argument("--out", type=Path, help="write everything measured there, as JSON")
    parser.add_argument("--in-rank", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    if arguments.in_rank is not None:
        in_rank(arguments.in_rank, arguments.strategies[0], arguments.samples, arguments.models)
        return 0
    rows = []
    for kind in arguments.strategies:
        for count in arguments.ranks:
            held = _held(kind, count, arguments)
            for name in arguments.models:
                row = _row(known[name], kind, count, arguments.samples, max(held[name]))
                rows.append(row)
                print(_line(row), flush=True)
    errors = [abs(row["error"]) for row in rows]
    within = sum(error <= 0.05 for error in errors)
    print(f"median error {median(errors):.2%}, worst {max(errors):.2%}; within 5 %: {within} of {len(errors)}")
    if arguments.out:
        document = {"benchmark": "parallel.memory", "machine": detect().to_json(), "samples": arguments.samples}
        arguments.out.write_text(json.dumps({**document, "rows": rows}, indent=1) + "\n")
    return 0


def _held(kind: str, count: int, arguments: argparse.Namespace) -> dict[str, list[int]]:
    """Model -> bytes of each rank."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "held.json"
        words = ["--in-rank", str(out), "--strategies", kind, "--samples", str(arguments.samples)]
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(count), "-m", MODULE]
        command = [sys.executable, *launcher, *words, "--models", *arguments.models]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{count} ranks of {kind} ended with {done.returncode}:\n{done.stderr[-3000:]}")
        found: dict[str, list[int]] = json.loads(out.read_text())
        return found


def _row(subject: Subject, kind: str, count: int, samples: int, measured: int) -> dict[str, Any]:
    step = train_step(subject, kind)
    made = flatout.forecast(step, subject.batch(samples), batch_size=samples * count, ranks=count)
    step.close()
    error = made.peak_bytes / measured - 1
    named = {"model": subject.name, "strategy": kind, "ranks": count}
    return {**named, "measured_bytes": measured, "forecast_bytes": made.peak_bytes, "error": error}


def _line(row: dict[str, Any]) -> str:
    sizes = f"measured {format_bytes(row['measured_bytes']):>9}, forecast {format_bytes(row['forecast_bytes']):>9}"
    return f"{row['model']:16} {row['strategy']:6} {row['ranks']} ranks  {sizes}  {row['error']:+.2%}"


if __name__ == "__main__":
    sys.exit(main())
