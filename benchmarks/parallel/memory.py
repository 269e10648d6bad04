"""`python -m benchmarks.parallel.memory`: what a rank was forecast to hold, beside what it holds.

The library's models at the sizes of benchmarks.memory, AdamW, each strategy, 2 and 4 ranks. The forecast is made in one
process, before there are ranks. Measured is the most that torch's CPU allocator held in a step, counted in C, of the
rank that held most. Gloo's threads let go of their copies a little later in some steps than in others: the error is
that of the least of the steps, forecast / measured - 1, and the most of them is named too. Of a pipeline, whose stages
the ranks choose by measured times in the first step, the forecast is of the stages that they chose, and the row says
whether those that a forecast assumes, by counted operations, are the same. Linux, with a C compiler.

With --cuda each rank has a GPU, and measured is what torch's caching allocator reserved.

    python -m benchmarks.parallel.memory --out memory.json
    tests/gpu/stand_in/gpu --gpus 4 --no-numbers python -m benchmarks.parallel.memory --cuda --out memory_cuda.json
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed

import flatout
from benchmarks.memory.cases import Subject
from benchmarks.memory.cases_library import library_cases
from flatout.data.nested import to_device
from flatout.machine.detect import detect
from flatout.parallel.pipeline import training as pipelines
from flatout.parallel.whole_tensors import STAGES
from flatout.plan import Plan, shares_of_batch
from flatout.replaced import replaced
from flatout.statistics import median
from flatout.strategies.facts import STRATEGIES, planned_for, strategies_of
from flatout.units import format_bytes

MODULE = "benchmarks.parallel.memory"
COUNT_SOURCE = Path(__file__).with_name("allocator_count.c")
STEPS = 12
STEPS_ON_GPU = 4
FIRST_STEADY = 2
"""Optimizer state is there from the second step on, DDP's buckets too."""
WITH_BATCH_NORM = ("ResNet",)


def subjects() -> dict[str, Subject]:
    return {one.subject.name: one.subject for one in library_cases() if one.subject.name not in WITH_BATCH_NORM}


def train_step(subject: Subject, kind: str, ranks: int, device: torch.device) -> flatout.TrainStep:
    model = subject.make().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    return flatout.TrainStep(model, optimizer, subject.loss_fn, planned_for(Plan(), kind, ranks, samples=None))


def measured_bytes(subject: Subject, kind: str, samples: int) -> tuple[list[int], list[int]]:
    """Of this rank, the most that was held in each steady step (of a pipeline, in the first one if that was more: the
    whole model is there at its beginning); and where the stages of a pipeline begin."""
    count = ctypes.CDLL(None)
    for name in ("allocator_held_bytes", "allocator_peak_bytes"):
        getattr(count, name).restype = ctypes.c_long
    gc.collect()
    before = count.allocator_held_bytes()
    torch.manual_seed(0)
    step = train_step(subject, kind, flatout.ranks().count, torch.device("cpu"))
    batch = subject.batch(samples)
    peaks = []
    for _ in range(STEPS):
        gc.collect()
        count.allocator_reset_peak()
        step(batch)
        peaks.append(count.allocator_peak_bytes() - before)
    step.close()
    stages = step.model.__dict__.get(STAGES)
    if stages is None:
        return peaks[FIRST_STEADY:], []
    return [max(one, peaks[0]) for one in peaks[FIRST_STEADY:]], stages.begins


def reserved_bytes(subject: Subject, kind: str, samples: int) -> tuple[list[int], list[int]]:
    """The same of this rank's GPU: the most that was reserved in any step."""
    here = flatout.ranks()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.manual_seed(0)
    step = train_step(subject, kind, here.count, here.device)
    batch = to_device(subject.batch(samples), here.device)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(STEPS_ON_GPU):
        step(batch)
    peak = torch.cuda.max_memory_reserved() - before
    step.close()
    stages = step.model.__dict__.get(STAGES)
    return [peak], [] if stages is None else stages.begins


def in_rank(out: Path, kind: str, samples: int, names: list[str]) -> None:
    torch.set_num_threads(1)
    here = flatout.ranks()
    measure = reserved_bytes if here.device.type == "cuda" else measured_bytes
    found: dict[str, Any] = {}  # bytes of each rank's steps and where stages begin, or why there are none
    for name in names:
        try:
            measured, begins = measure(subjects()[name], kind, samples)
        except flatout.UsageError as error:  # raised on all of them: no rule for the model, heads that do not divide
            found[name] = str(error)
            continue
        every: list[Any] = [None] * here.count
        distributed.all_gather_object(every, measured)
        found[name] = every, begins
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
    parser.add_argument("--cuda", action="store_true", help="on GPUs, one for each rank")
    parser.add_argument("--in-rank", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    if arguments.in_rank is not None:
        in_rank(arguments.in_rank, arguments.strategies[0], arguments.samples, arguments.models)
        return 0
    rows, device = [], torch.device("cuda" if arguments.cuda else "cpu")
    for kind in arguments.strategies:
        for count in arguments.ranks:
            if kind not in strategies_of(count):
                continue
            held = _held(kind, count, arguments)
            for name in arguments.models:
                if isinstance(held[name], str):
                    print(f"{name:16} {kind:11} {count} ranks  {held[name]}", flush=True)
                    continue
                row = _row(known[name], kind, count, arguments.samples, device, *held[name])
                rows.append(row)
                print(_line(row), flush=True)
    errors = [abs(row["error"]) for row in rows]
    within = sum(error <= 0.05 for error in errors)
    print(f"median error {median(errors):.2%}, worst {max(errors):.2%}; within 5 %: {within} of {len(errors)}")
    if arguments.out:
        document = {"benchmark": "parallel.memory", "device": device.type, "machine": detect().to_json()}
        document["samples"] = arguments.samples
        arguments.out.write_text(json.dumps({**document, "rows": rows}, indent=1) + "\n")
    return 0


def _held(kind: str, count: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Model -> for each rank, bytes of each step; a text where it cannot be trained so."""
    with tempfile.TemporaryDirectory() as folder:
        counting, out = Path(folder) / "allocator_count.so", Path(folder) / "held.json"
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", counting, COUNT_SOURCE, "-ldl", "-lpthread"], check=True)
        words = ["--in-rank", str(out), "--strategies", kind, "--samples", str(arguments.samples)]
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(count), "-m", MODULE]
        command = [sys.executable, *launcher, *words, "--models", *arguments.models]
        environment = {**os.environ}
        if not arguments.cuda:
            environment["LD_PRELOAD"] = str(counting)
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if done.returncode:
            raise SystemExit(f"{count} ranks of {kind} ended with {done.returncode}:\n{done.stderr[-3000:]}")
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def _row(
    subject: Subject,
    kind: str,
    count: int,
    samples: int,
    device: torch.device,
    held: list[list[int]],
    begins: list[int],
) -> dict[str, Any]:
    measured, most = max(min(of_rank) for of_rank in held), max(max(of_rank) for of_rank in held)
    step = train_step(subject, kind, count, device)
    whole = samples * shares_of_batch(step.plan, count)

    def forecast() -> flatout.MemoryForecast:
        return flatout.forecast(step, to_device(subject.batch(samples), device), batch_size=whole, ranks=count)

    made, stages = forecast(), {}
    if begins:
        stages = {"stages": begins, "assumed_stages": list(made.stages), "assumed_bytes": made.peak_bytes}
    if begins != list(made.stages):
        with replaced(pipelines, "split_evenly", lambda _: lambda *_, **__: begins):
            made = forecast()
    step.close()
    error = made.peak_bytes / measured - 1
    named = {"model": subject.name, "strategy": kind, "ranks": count}
    sizes = {"measured_bytes": measured, "most_bytes": most, "forecast_bytes": made.peak_bytes}
    return {**named, **sizes, "error": error, **stages}


def _line(row: dict[str, Any]) -> str:
    sizes = f"measured {format_bytes(row['measured_bytes']):>9}, forecast {format_bytes(row['forecast_bytes']):>9}"
    late = row["most_bytes"] / row["measured_bytes"] - 1
    split = ""
    if "stages" in row:
        split = f", blocks {row['stages']}, assumed {row['assumed_stages']}"
    named = f"{row['model']:16} {row['strategy']:6} {row['ranks']} ranks"
    return f"{named}  {sizes}  {row['error']:+.2%}, most {late:+.1%}{split}"


if __name__ == "__main__":
    sys.exit(main())
