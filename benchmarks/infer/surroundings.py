"""What a figure of these benchmarks was measured on and beside."""

from __future__ import annotations

import importlib.metadata
import time
from typing import Any

import torch

from flatout.machine.detect import detect

_ARRAY: list[torch.Tensor] = []


def surroundings(*packages: str) -> dict[str, Any]:
    """The machine and the versions of torch and of these packages (None = not installed)."""
    return {"machine": detect().to_json(), "versions": {name: _version(name) for name in ("torch", *packages)}}


def read_rate(tries: int = 4) -> float:
    """Bytes a second at which memory can be read right now: 256 MiB read once, the best of a few tries."""
    if not _ARRAY:
        _ARRAY.append(torch.ones(2**26))
    best = 0.0
    for _ in range(tries):
        began = time.perf_counter()
        _ARRAY[0].amax()
        best = max(best, _ARRAY[0].nbytes / (time.perf_counter() - began))
    return best


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
