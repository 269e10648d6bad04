"""What a figure of these benchmarks was measured on and beside."""

from __future__ import annotations

import importlib.metadata
import time
from typing import Any

import torch

from flatout.machine.detect import detect

_ARRAYS: dict[str, torch.Tensor] = {}
READ_BYTES = {"cpu": 2**28, "cuda": 2**31}
"""Several times what caches hold."""


def surroundings(*packages: str) -> dict[str, Any]:
    """The machine and the versions of torch and of these packages (None = not installed)."""
    return {"machine": detect().to_json(), "versions": {name: _version(name) for name in ("torch", *packages)}}


def read_rate(device: str = "cpu", tries: int = 4) -> float:
    """Bytes a second at which the device's memory can be read right now: 256 MiB (a GPU: 2 GiB) read once, the best of
    a few tries."""
    if device not in _ARRAYS:
        _ARRAYS[device] = torch.ones(READ_BYTES[device] // 4, device=device)
    best = 0.0
    for _ in range(tries):
        wait_for(device)
        began = time.perf_counter()
        _ARRAYS[device].amax()
        wait_for(device)
        best = max(best, READ_BYTES[device] / (time.perf_counter() - began))
    return best


def wait_for(device: str) -> None:
    """Until a GPU has done what it was given."""
    if device == "cuda":
        torch.cuda.synchronize()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
