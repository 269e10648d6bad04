"""`python -m benchmarks.kernels.linear_cross_entropy`: last layer and loss, forward and backward, ours beside others.

Ways take turns, one call each, in another order every round; ratios are those of paired calls against the compiled
plain version (exact signed-rank interval, 95 %). Memory is the most that a call holds at once beyond its inputs, the
loss and the returned gradients, by torch's allocator on a GPU and by the tensors' own storages on a CPU. Errors are
norms of differences from float64, relative to its norm: the largest of loss and gradients. The peers (liger-kernel,
cut-cross-entropy) take part where they are installed and the device is a GPU.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.infer.surroundings import surroundings
from flatout import linear_cross_entropy
from flatout.memory.tracking import Tracker
from flatout.statistics import compare_paired, median

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(hidden, weight, targets)"""
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Case:
    rows: int
    features: int
    classes: int
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return f"{self.rows} x {self.features} x {self.classes} {str(self.dtype).removeprefix('torch.')}"

    def inputs(self, device: str) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(0)
        hidden = torch.randn(self.rows, self.features).to(device, self.dtype).requires_grad_()
        weight = (torch.randn(self.classes, self.features) / self.features**0.5).to(device, self.dtype).requires_grad_()
        return hidden, weight, torch.randint(0, self.classes, (self.rows,)).to(device)


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(functional.linear(hidden, weight).float(), targets)


def ways(device: str) -> dict[str, Loss]:
    found: dict[str, Loss] = {
        "torch, compiled": torch.compile(plain, dynamic=False),
        "torch": plain,
        "flatout": lambda hidden, weight, targets: linear_cross_entropy(hidden, weight, targets),
    }
    for size in (16, 64, 128):
        found[f"flatout, {size} MiB"] = lambda hidden, weight, targets, size=size: linear_cross_entropy(
            hidden, weight, targets, chunk_bytes=size * MIB
        )
    return found | (peers() if device == "cuda" else {})


def peers() -> dict[str, Loss]:
    found: dict[str, Loss] = {}
    try:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        found["liger"] = lambda hidden, weight, targets: liger_fused_linear_cross_entropy(hidden, weight, targets)
    except ImportError as error:
        print(f"liger-kernel: {error}")
    try:
        from cut_cross_entropy import linear_cross_entropy as cut

        found["cut-cross-entropy"] = lambda hidden, weight, targets: cut(hidden, weight, targets)
    except ImportError as error:
        print(f"cut-cross-entropy: {error}")
    return found


def called(loss: Loss, inputs: Sequence[Tensor]) -> list[Tensor]:
    value = loss(*inputs)
    return [value, *torch.autograd.grad(value, list(inputs[:2]))]


def seconds(loss: Loss, inputs: Sequence[Tensor], device: str) -> float:
    _wait(device)
    began = time.perf_counter()
    called(loss, inputs)
    _wait(device)
    return time.perf_counter() - began


def extra_bytes(loss: Loss, inputs: Sequence[Tensor], device: str) -> int:
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = called(loss, inputs)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
    else:
        with Tracker() as tracker:  # which counts only what it has seen made
            inputs = [one.detach().clone().requires_grad_(one.requires_grad) for one in inputs]
            before = sum(one.untyped_storage().nbytes() for one in inputs)
            result = called(loss, inputs)
        peak = tracker.peak_bytes - before
    return peak - sum(one.untyped_storage().nbytes() for one in result)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def largest_error(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    pairs = zip(found, exact, strict=True)
    return max(float((one.detach().double() - other).norm() / other.norm()) for one, other in pairs)


def measured(case: Case, device: str, rounds: int) -> dict[str, Any]:
    inputs = case.inputs(device)
    exact_inputs = [one.detach().double().requires_grad_() for one in inputs[:2]]
    value = functional.cross_entropy(functional.linear(*exact_inputs), inputs[2])
    exact = [one.detach() for one in (value, *torch.autograd.grad(value, exact_inputs))]
    losses, errors, memory = {}, {}, {}
    for name, loss in ways(device).items():
        try:
            for _ in range(2):
                result = called(loss, inputs)
            errors[name] = largest_error(result, exact)
            del result
            memory[name] = extra_bytes(loss, inputs, device)
        except Exception as error:  # a way that fails is reported, and the others go on
            print(f"  {name}: {type(error).__name__}: {str(error).splitlines()[0][:160]}")
            continue
        losses[name] = loss
    del exact
    taken: dict[str, list[float]] = {name: [] for name in losses}
    for turn in range(rounds + 1):
        for name in random.sample(list(losses), len(losses)):
            duration = seconds(losses[name], inputs, device)
            if turn:  # the first round warms up
                taken[name].append(duration)
    (reference, *_) = taken
    rows = {}
    for name, found in taken.items():
        ratio = compare_paired(found, taken[reference])  # how many times the time of the reference
        rows[name] = {
            "median_seconds": median(found),
            "seconds": found,
            "times_reference": asdict(ratio),
            "extra_bytes": memory[name],
            "largest_error": errors[name],
        }
        print(
            f"  {name:22} {median(found) * 1e3:9.3f} ms  {ratio.ratio:5.2f} ({ratio.low:.2f} to {ratio.high:.2f}) of "
            f"compiled  {memory[name] / MIB:8.1f} MiB  error {errors[name]:.1e}",
            flush=True,
        )
    return {"case": case.name, "rows": rows}


CASES = [
    Case(rows=2048, features=512, classes=50_000, dtype=torch.float32),
    Case(rows=2048, features=512, classes=50_000, dtype=torch.bfloat16),
    Case(rows=8192, features=768, classes=50_257, dtype=torch.bfloat16),
    Case(rows=4096, features=4096, classes=128_256, dtype=torch.bfloat16),
]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels.linear_cross_entropy", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--cases", nargs="+", type=int, default=range(len(CASES)), help="by number, from 0")
    parser.add_argument("--out", type=Path, help="write everything measured there, as JSON")
    arguments = parser.parse_args(words)
    results = []
    for number in arguments.cases:
        print(f"{CASES[number].name} ({arguments.rounds} rounds)", flush=True)
        results.append(measured(CASES[number], arguments.device, arguments.rounds))
        if arguments.out:
            document = {"benchmark": "kernels.linear_cross_entropy", "device": arguments.device}
            document |= {**surroundings("triton", "liger-kernel", "cut-cross-entropy"), "results": results}
            arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
