"""The values that say how fast a machine can be: a Peak with its spread, and the Ceilings of one machine.

A ceiling is the best that a simple, ideal piece of work reached on this very machine. Real work is stated as a share
of it. What could not be measured is None, and `reasons` says why: another machine's figure is never put in its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from flatout.decoding import decode


@dataclass(frozen=True, kw_only=True)
class Peak:
    """A rate that this machine reached, its spread, and the work by which it was reached."""

    value: float  # that of the fastest quarter of the samples
    low: float  # that of the slowest quarter
    high: float  # the best sample
    samples: int
    unit: str  # "FLOP/s", "B/s", ...
    how: str  # "2048 x 2048 x 2048", "256 MiB read once"

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: object) -> Peak:
        return decode(cls, data)


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """What one device of one machine reached, with one version of torch. Rates of a GPU if there is one."""

    device: str  # "cpu" or "cuda:0"
    gemm_flops_per_second: Mapping[str, Peak]  # by dtype: "fp32", "tf32", "bf16", "fp16", "int8"
    memory_read_bytes_per_second: Peak | None = None
    memory_copy_bytes_per_second: Peak | None = None  # bytes read plus bytes written
    host_to_device_pinned_bytes_per_second: Peak | None = None
    host_to_device_pageable_bytes_per_second: Peak | None = None
    device_to_host_pinned_bytes_per_second: Peak | None = None
    device_to_host_pageable_bytes_per_second: Peak | None = None
    launches_per_second: Peak | None = None  # of the smallest operation, from one thread
    disk_read_bytes_per_second: Peak | None = None
    reasons: Mapping[str, str] = field(default_factory=dict)  # why a field, or a dtype ("gemm fp16"), is missing
    quick: bool
    threads: int
    contended: bool = False  # others competed for the processor, or the GPU: everything may be too low
    measured_at: str  # ISO 8601, UTC
    torch_version: str

    def rates(self) -> dict[str, Peak | None]:
        """Every rate but the GEMMs, by field name, in the order in which they are shown."""
        return {name: getattr(self, name) for name in _RATES}

    def best_gemm(self) -> tuple[str, Peak] | None:
        """(dtype, peak) of the fastest matrix product in floating point; None if none was measured."""
        peaks = {name: peak for name, peak in self.gemm_flops_per_second.items() if name != "int8"}
        return max(peaks.items(), key=lambda item: item[1].value) if peaks else None

    def raised_by(self, other: Ceilings) -> Ceilings:
        """With every peak of the other's that is higher, or that is missing here."""
        gemm = {**self.gemm_flops_per_second}
        for dtype, peak in other.gemm_flops_per_second.items():
            gemm[dtype] = _higher(gemm.get(dtype), peak) or peak
        theirs = other.rates()
        rates = {name: _higher(own, theirs[name]) for name, own in self.rates().items()}
        found = {*rates, *(f"gemm {dtype}" for dtype in gemm)} - {name for name, peak in rates.items() if peak is None}
        reasons = {name: reason for name, reason in self.reasons.items() if name not in found}
        return replace(self, gemm_flops_per_second=gemm, reasons=reasons).with_rates(rates)

    def with_rates(self, rates: Mapping[str, Peak | None]) -> Ceilings:
        """With these rates, by field name."""
        changes: dict[str, Any] = {**rates}  # mypy cannot see that these are the names of rates only
        return replace(self, **changes)

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: object) -> Ceilings:
        return decode(cls, data)


_RATES = tuple(one.name for one in fields(Ceilings) if one.name.endswith("_per_second") and one.name[:4] != "gemm")


def _higher(a: Peak | None, b: Peak | None) -> Peak | None:
    if a is None or b is None:
        return a or b
    return a if a.value >= b.value else b
