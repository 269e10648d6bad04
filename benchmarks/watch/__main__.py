"""`python -m benchmarks.watch`: what `flatout run` without a plan adds to a step, measured by turns in one process.

Whole runs differ by more than the cost that is looked for, so one loop is run here in windows with the watch installed
and with it removed, in turn, and the windows are compared in pairs. The watch does what it does in a run: it counts
steps, samples times, and opens its windows of closer observation as often as a run would.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flatout.machine.detect import detect
from flatout.script.runner import Runner
from flatout.statistics import compare_paired, median

WINDOW_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A training loop: `step` runs one step."""

    name: str
    step: Callable[[], None]


def loops(device: str) -> list[Loop]:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128), nn.LayerNorm(128)) for _ in range(12)]
    deep = nn.Sequential(*blocks, nn.Linear(128, 10))
    return [
        _loop(
            "tiny linear", nn.Linear(8, 4), torch.randn(4096, 8), torch.randint(0, 4, (4096,)), batch=16, device=device
        ),
        _loop(
            "guides' MLP 784-256-10",
            _mlp(),
            torch.randn(8192, 784),
            torch.randint(0, 10, (8192,)),
            batch=64,
            device=device,
        ),
        _loop("60 modules", deep, torch.randn(8192, 128), torch.randint(0, 10, (8192,)), batch=64, device=device),
    ]


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))


def _loop(name: str, model: nn.Module, x: torch.Tensor, y: torch.Tensor, *, batch: int, device: str) -> Loop:
    model.to(device)
    optimizer = torch.optim.Adam(model.parameters())
    loader = DataLoader(TensorDataset(x, y), batch_size=batch, shuffle=True)
    batches = iter(loader)

    def step() -> None:
        nonlocal batches
        data = next(batches, None)
        if data is None:
            batches = iter(loader)
            data = next(batches)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(data[0].to(device)), data[1].to(device))
        loss.backward()
        optimizer.step()

    return Loop(name=name, step=step)


def window(loop: Loop, steps: int, watched: bool) -> float:
    """Seconds of a step, as the median over one window."""
    runner = Runner()
    if watched:
        runner.watch.install(torch)
    try:
        for _ in range(5):
            loop.step()
        seconds = []
        for _ in range(steps):
            start = time.perf_counter()
            loop.step()
            seconds.append(time.perf_counter() - start)
    finally:
        runner.watch.uninstall()
    return median(seconds)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.watch", description=__doc__)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, help="write everything measured there, as JSON")
    arguments = parser.parse_args(words)
    torch.set_num_threads(1)
    results = []
    for loop in loops(arguments.device):
        step = window(loop, 50, watched=False)
        steps = max(20, int(WINDOW_SECONDS / step))
        plain, watched = [], []
        for pair in range(arguments.pairs):
            for turn in (False, True) if pair % 2 == 0 else (True, False):
                (watched if turn else plain).append(window(loop, steps, turn))
        found = compare_paired(plain, watched)
        figures = {"plain": plain, "watched": watched, "comparison": asdict(found)}
        results.append({"loop": loop.name, "steps_a_window": steps, **figures})
        print(
            f"{loop.name:24} step {median(plain) * 1e6:8.1f} µs, watched {(1 / found.ratio - 1):+.2%} "
            f"({1 / found.high - 1:+.2%} to {1 / found.low - 1:+.2%}), {arguments.pairs} pairs",
            flush=True,
        )
    if arguments.out:
        document = {"benchmark": "watch", "device": arguments.device, "machine": detect().to_json(), "results": results}
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
