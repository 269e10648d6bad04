"""How long should windows be? The error of a comparison after five seconds, by the length of its windows.

    python -m benchmarks.search.windows [--seconds 35]

Two small models are trained, and every step is timed. The steps are cut into windows as a comparison would take them,
with two steps left out after each switch; neighbours make pairs, whose ratio would be 1 on a machine without noise.
"""

from __future__ import annotations

import argparse
import math
import time

import torch
from torch import nn

from flatout.statistics import median

WIDTHS = (256, 1024)
WINDOW_SECONDS = (0.01, 0.02, 0.04, 0.08, 0.15, 0.3)
SETTLE, WARM, BUDGET_SECONDS = 2, 200, 5.0


def steps_of(width: int, seconds: float) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = torch.randn(64, 64), torch.randint(0, 10, (64,))
    taken, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        began = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        taken.append(time.perf_counter() - began)
    return taken[WARM:]


def error_after_budget(taken: list[float], window_seconds: float) -> tuple[int, float]:
    """(steps of a window, deviation of the mean log ratio of as many pairs as fit); by the 68 % point of single
    pairs, which strays do not move."""
    steps = max(1, round(window_seconds / median(taken)))
    length = SETTLE + steps
    medians = [median(taken[at + SETTLE : at + length]) for at in range(0, len(taken) - length, length)]
    ratios = sorted(abs(math.log(one / other)) for one, other in zip(medians[::2], medians[1::2], strict=False))
    pair_seconds = 2 * length * sum(taken) / len(taken)
    return steps, ratios[int(0.68 * len(ratios))] * math.sqrt(pair_seconds / BUDGET_SECONDS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=35.0, help="of each model")
    seconds = parser.parse_args().seconds
    for width in WIDTHS:
        taken = steps_of(width, seconds)
        print(f"step {median(taken) * 1e3:.2f} ms")
        for window in WINDOW_SECONDS:
            steps, error = error_after_budget(taken, window)
            print(f"  windows of {window:.2f} s ({steps} steps): ±{error:.1%} after {BUDGET_SECONDS:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
