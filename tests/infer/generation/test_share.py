"""Weights that lie in the processor's cache are not held against the memory's rate."""

from __future__ import annotations

from typing import Any

import pytest

from flatout.infer.generation import share as share_module
from flatout.infer.generation.families import read_decoder
from flatout.infer.generation.share import Work
from flatout.machine.ceilings import Ceilings, Peak
from tests.infer.generation.tiny import model


def _peak(value: float, unit: str) -> Peak:
    return Peak(value=value, low=value, high=value, samples=1, unit=unit, how="")


CEILINGS = Ceilings(
    device="cpu",
    gemm_flops_per_second={"fp32": _peak(1e12, "FLOP/s")},
    memory_read_bytes_per_second=_peak(1e9, "B/s"),
    quick=True,
    threads=1,
    measured_at="2026-01-01T00:00:00+00:00",
    torch_version="2.13.0",
)


@pytest.mark.parametrize(
    ("cache", "told"),
    [
        (400_000, "share unknown: the weights lie in the cache (195 KiB; it holds 391 KiB)"),
        (120_000, "share unknown: the weights lie in the cache in part (195 KiB; it holds 117 KiB)"),
        (50_000, "139% of memory bandwidth"),
        (None, "139% of memory bandwidth"),
    ],
)
def test_weights_in_the_cache(cache: Any, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share_module, "last_cache_bytes", lambda: cache)
    work = Work(read_decoder(model("own GPT-2")), "fp32", 200_000, 4)
    work.bytes, work.seconds = 1.39e9, 1.0
    assert str(work.share(CEILINGS)) == told


def test_the_cache_of_this_processor_is_plausible() -> None:
    found = share_module.last_cache_bytes()
    assert found is None or 2**14 <= found <= 2**34
