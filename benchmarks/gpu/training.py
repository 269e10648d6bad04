"""`python -m benchmarks.gpu.training`: a training step on the GPU, by hand and by TrainStep, choice by choice.

Every row is one way to run the same model, optimizer and batches (already on the GPU). Ways take turns, a window of
steps each, in another order every round; a window lasts until the GPU is done. Ratios are those of paired windows
against the plain loop in fp32 (exact signed-rank interval, 95 %). Memory is the peak of torch's allocator in one
window of that way, with the other ways' weights taken off. 'tuned' is what `flatout.tune(step, batches)` found within
--tune-seconds; the peer is Fabric at its best settings, where Lightning is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import flatout
from benchmarks.infer.surroundings import surroundings
from flatout import Plan, TrainStep, supervised
from flatout.flops import count_step
from flatout.models import GPT2, MLP, GPT2Config, MLPConfig, ResNet, ResNetConfig
from flatout.statistics import compare_paired, median

WINDOW_SECONDS = 0.25
BATCHES = 4
Step = Callable[[Any], Any]


@dataclass(frozen=True, kw_only=True)
class Workload:
    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    images: bool = False


def loss(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, -2), targets.flatten())


def workloads() -> list[Workload]:
    gpt = GPT2Config(dropout=0.0, embedding_dropout=0.0, attention_dropout=0.0)
    return [
        Workload(
            name="MLP 784-256-10, batch 64",
            model=lambda: MLP(MLPConfig(inputs=784, hidden=(256,))),
            batch=lambda: (torch.randn(64, 784), torch.randint(0, 10, (64,))),
        ),
        Workload(
            name="ResNet-50, batch 64, 224 x 224",
            model=lambda: ResNet(ResNetConfig()),
            batch=lambda: (torch.randn(64, 3, 224, 224), torch.randint(0, 1000, (64,))),
            images=True,
        ),
        Workload(
            name="GPT-2 124M, batch 8 of 1024 tokens",
            model=lambda: GPT2(gpt),
            batch=lambda: (torch.randint(0, 50257, (8, 1024)), torch.randint(0, 50257, (8, 1024))),
        ),
    ]


def by_hand(workload: Workload, *, autocast: bool = False, compiled: bool = False, fused: bool = False) -> Step:
    model = _model(workload)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=fused)
    called = torch.compile(model) if compiled else model

    def step(batch: Any) -> Any:
        inputs, targets = batch
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16) if autocast else contextlib.nullcontext():
            value = loss(called(inputs), targets)
        value.backward()
        optimizer.step()
        return value

    return step


def by_train_step(workload: Workload, plan: Plan | None = None) -> TrainStep:
    model = _model(workload)
    return TrainStep(model, torch.optim.AdamW(model.parameters(), 1e-4), supervised(loss), plan)


def _model(workload: Workload) -> nn.Module:
    torch.manual_seed(0)
    return workload.model().cuda()


def by_fabric(workload: Workload) -> Step:
    """bf16-mixed, compiled, channels_last for images, the fused optimizer."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cuda", devices=1, precision="bf16-mixed")
    model = _model(workload)
    if workload.images:
        model = model.to(memory_format=torch.channels_last)
    model, optimizer = fabric.setup(torch.compile(model), torch.optim.AdamW(model.parameters(), 1e-4, fused=True))

    def step(batch: Any) -> Any:
        inputs, targets = batch
        if workload.images:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        optimizer.zero_grad()
        value = loss(model(inputs), targets)
        fabric.backward(value)
        optimizer.step()
        return value

    return step


def tuned(workload: Workload, batches: Sequence[Any], budget_seconds: float) -> Step:
    found = flatout.tune(by_train_step(workload), batches, seconds=budget_seconds)
    print("  " + "\n  ".join(found.summary().splitlines()), flush=True)
    return by_train_step(workload, found.plan)


def ways(workload: Workload, batches: Sequence[Any], budget_seconds: float) -> dict[str, Callable[[], Step]]:
    """Name -> makes the step."""
    images: dict[str, Any] = {"memory_format": "channels_last"} if workload.images else {}
    bf16: dict[str, Any] = {"precision": "bf16", "optimizer": "fused", **images}
    return {
        "by hand, fp32": lambda: by_hand(workload),
        "TrainStep, no plan": lambda: by_train_step(workload),
        "TrainStep, TF32": lambda: by_train_step(workload, Plan(matmul_precision="high")),
        "TrainStep, bf16 + fused": lambda: by_train_step(workload, Plan(**bf16)),
        "TrainStep, bf16 + fused + compile": lambda: by_train_step(workload, Plan(**bf16, compile="default")),
        "TrainStep, bf16 + fused + regional": lambda: by_train_step(workload, Plan(**bf16, compile="regional")),
        "Fabric, bf16 + fused + compile": lambda: by_fabric(workload),
        "TrainStep, tuned": lambda: tuned(workload, batches, budget_seconds),
        "by hand, bf16 + fused + compile": lambda: by_hand(workload, autocast=True, compiled=True, fused=True),
    }


def measured(workload: Workload, rounds: int, budget_seconds: float, wanted: Sequence[str] | None) -> dict[str, Any]:
    batches = [tuple(one.cuda() for one in workload.batch()) for _ in range(BATCHES)]
    steps, first, peak = {}, {}, {}
    for name, make in ways(workload, batches, budget_seconds).items():
        if wanted and name != "by hand, fp32" and not any(word in name for word in wanted):
            continue
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        began = time.perf_counter()
        try:
            step = make()
            _window(step, batches, 3)
        except Exception as error:  # a way that fails is told, and the others go on
            print(f"  {name}: {type(error).__name__}: {str(error).splitlines()[0][:160]}")
            continue
        first[name] = time.perf_counter() - began
        torch.cuda.reset_peak_memory_stats()
        _window(step, batches, 2)
        peak[name] = torch.cuda.max_memory_allocated() - before
        steps[name] = step
    flops = _flops(workload, batches[0])
    windows: dict[str, list[float]] = {name: [] for name in steps}
    counts = {name: max(4, int(WINDOW_SECONDS / _window(step, batches, 4))) for name, step in steps.items()}
    for turn in range(rounds + 1):
        for name in random.sample(list(steps), len(steps)):
            seconds = _window(steps[name], batches, counts[name])
            if turn:  # the first round warms up
                windows[name].append(seconds)
    return {"workload": workload.name, "flops": flops, "rows": _rows(windows, first, peak, flops)}


def _rows(windows: dict[str, list[float]], first: Any, peak: Any, flops: float) -> dict[str, Any]:
    (plain, *_) = windows
    rows = {}
    for name, found in windows.items():
        ratio = compare_paired(windows[plain], found)
        rows[name] = {
            "median_seconds": median(found),
            "windows": found,
            "flops_per_second": flops / median(found),
            "first_steps_seconds": first[name],
            "peak_bytes": peak[name],
            "against_plain": asdict(ratio),
        }
        print(
            f"  {name:36} {median(found) * 1e3:8.3f} ms  x{ratio.ratio:.2f} ({ratio.low:.2f}-{ratio.high:.2f})  "
            f"{flops / median(found) / 1e12:6.1f} TFLOP/s  {peak[name] / 2**30:6.2f} GiB  "
            f"first steps {first[name]:.1f} s",
            flush=True,
        )
    return rows


def _window(step: Step, batches: list[Any], count: int) -> float:
    """Seconds a step, until the GPU is done."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for index in range(count):
        step(batches[index % len(batches)])
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / count


def _flops(workload: Workload, batch: Any) -> float:
    step = by_hand(workload)
    finish = count_step()
    step(batch)
    return finish()


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.training", description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--only", nargs="+", help="prefixes of workloads' names")
    parser.add_argument("--ways", nargs="+", help="parts of the names of ways; the plain loop is always one")
    parser.add_argument("--tune-seconds", type=float, default=60)
    parser.add_argument("--out", type=Path, help="write everything measured there, as JSON")
    arguments = parser.parse_args(words)
    results = []
    for workload in workloads():
        if arguments.only and not any(workload.name.lower().startswith(one.lower()) for one in arguments.only):
            continue
        print(f"{workload.name} ({arguments.rounds} rounds)", flush=True)
        results.append(measured(workload, arguments.rounds, arguments.tune_seconds, arguments.ways))
        if arguments.out:
            document = {"benchmark": "gpu.training", **surroundings("triton"), "results": results}
            arguments.out.write_text(json.dumps(document, indent=1) + "\n")
        gc.collect()
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
