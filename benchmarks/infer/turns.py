"""Contenders in turns: each does its work once a round, in another order every round; the first round warms up.

A sample is seconds per item, so a slow contender may do fewer items a round than a fast one; how many is written down.
"""

from __future__ import annotations

import importlib.metadata
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from flatout.machine.detect import detect
from flatout.statistics import compare_paired, median

Turn = Callable[[int], int]
"""Does the work of round n; returns how many items that were."""


def take_turns(contenders: dict[str, Turn], rounds: int) -> dict[str, list[float]]:
    """Seconds per item of each round."""
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name in random.sample(list(contenders), len(contenders)):
            start = time.perf_counter()
            items = contenders[name](turn)
            if turn:
                samples[name].append((time.perf_counter() - start) / items)
        print(f"  round {turn} of {rounds} done", file=sys.stderr, flush=True)
    return samples


def rows(samples: dict[str, list[float]], baseline: str) -> dict[str, Any]:
    """Each contender's median, quartiles and its ratio to the baseline's paired samples (above 1: faster)."""
    found = {}
    for name, seconds in samples.items():
        ordered = sorted(seconds)
        found[name] = {
            "items_per_second": 1 / median(seconds),
            "seconds_per_item": seconds,
            "quartiles": [ordered[len(ordered) // 4], ordered[(3 * len(ordered)) // 4]],
            "against_baseline": asdict(compare_paired(samples[baseline], seconds)),
        }
    return found


def product_flops_per_second(dtype: str, size: int = 2048) -> Turn:
    """A turn of square matrix products of torch's own; its items are floating point operations."""
    if dtype == "int8":
        a, b = (torch.randint(-64, 64, (size, size), dtype=torch.int8) for _ in "ab")
        run: Callable[[], Any] = lambda: torch._int_mm(a, b)  # noqa: E731
    else:
        kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
        a, b = (torch.randn(size, size).to(kind) for _ in "ab")
        run = lambda: a @ b  # noqa: E731

    def turn(number: int) -> int:
        for _ in range(4):
            run()
        return 4 * 2 * size**3

    return turn


def versions(*names: str) -> dict[str, str]:
    found = {}
    for name in ("torch", *names):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def write(out: Path | None, document: dict[str, Any]) -> None:
    """With the machine and the number of threads."""
    if out is not None:
        whole = {"machine": detect().to_json(), "threads": torch.get_num_threads(), **document}
        out.write_text(json.dumps(whole, indent=1) + "\n")
