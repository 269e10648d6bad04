"""What a GPU makes of a step's operators: of each kind a time for every call, and a share of the published peak.

The device's time of an operator is `seconds_per_call` and its work at `share` of what the GPU's documents promise:
operations at the rate of its arithmetic, or bytes at that of its memory, whichever takes longer. The host's time is so
much for each operator that it launches. Both were fitted to steps of twelve models measured on an NVIDIA H100, in fp32,
TF32 and bf16 (`benchmarks/results/whatif_measured_h100.json`; `python -m benchmarks.whatif --fit` fits them again).
That the same shares hold on other GPUs is an assumption.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from flatout.machine.published_peaks import GpuEntry
from flatout.profiling.operator_classes import PRODUCTS
from flatout.profiling.step_operators import Operator

MEASURED_ON = "NVIDIA H100 80GB HBM3"
ALIGNED = 8
"""Of sizes of 16-bit products; others take about five times as long there."""
UNALIGNED_SLOWDOWN = 5.0
OVERLAP_POWER = 4.0
"""Host and device work at the same time, and each waits for the other now and then: a step takes the fourth root of
the sum of their times' fourth powers."""


UNBOUND_SHARE = 0.5
"""Where no measured call was bound by its work."""


class Rate(NamedTuple):
    seconds_per_call: float
    share: float
    """Of the published peak; above 1 where tensors stay in the GPU's caches."""


@dataclass(frozen=True, kw_only=True)
class GpuModel:
    """Rates by kind of operator, and the host's time for each operator that it launches."""

    rates: Mapping[str, Rate]
    host_seconds: Mapping[str, float]
    """By part of the step; 'time step': of a recurrent layer."""


@dataclass(frozen=True, kw_only=True)
class GpuTime:
    """Seconds of one step."""

    device_seconds: float
    host_seconds: float
    by_kind: Mapping[str, float]
    """The device's, longest first."""

    @property
    def step_seconds(self) -> float:
        power = OVERLAP_POWER
        return float((self.device_seconds**power + self.host_seconds**power) ** (1 / power))


def gpu_time(operators: Iterable[Operator], gpu: GpuEntry, model: GpuModel, *, tf32: bool) -> GpuTime:
    """tf32: may fp32 products run as TF32? Convolutions and recurrent layers do anyway, which is torch's default.

    KeyError with the dtype where the GPU has no published rate for it.
    """
    by_kind: dict[str, float] = {}
    host = 0.0
    for one in operators:
        kind = kind_of(one, tf32=tf32)
        rate = model.rates[kind]
        calls = one.time_steps if kind.startswith("recurrent") else one.calls
        seconds = calls * rate.seconds_per_call + ideal_seconds(one, gpu, tf32=tf32) / rate.share
        by_kind[kind] = by_kind.get(kind, 0.0) + seconds
        host += host_seconds(one, model)
    ordered = dict(sorted(by_kind.items(), key=lambda item: -item[1]))
    return GpuTime(device_seconds=sum(by_kind.values()), host_seconds=host, by_kind=ordered)


def host_seconds(one: Operator, model: GpuModel) -> float:
    steps = one.time_steps * model.host_seconds["time step"] if one.operator_class == "recurrent" else 0.0
    return one.calls * model.host_seconds[one.part] + steps


def ideal_seconds(one: Operator, gpu: GpuEntry, *, tf32: bool) -> float:
    """At the published peaks."""
    moved = one.bytes / gpu.memory_bytes_per_second
    if not one.flops:
        return moved
    computed = one.flops / _peak(gpu, _arithmetic(one, tf32=tf32))
    slowdown = 1.0 if _is_aligned(one) else UNALIGNED_SLOWDOWN
    return max(computed * slowdown, moved)


def kind_of(one: Operator, *, tf32: bool) -> str:
    """The row of the table."""
    found: str = one.operator_class
    if one.part == "optimizer":
        return "optimizer"
    if "batch_norm" in one.name:
        return "batch norm, half" if one.half else "batch norm"
    if found not in ("matmul", "pointwise", "copy", "other") and "backward" in one.name:
        found = f"{found} backward"
    if one.operator_class in PRODUCTS:
        found = f"{found}, {'half' if one.half else 'tf32' if found == 'matmul' and tf32 else 'fp32'}"
    return found if found in KINDS else "pointwise"


KINDS = frozenset(
    {"optimizer", "batch norm", "batch norm, half", "pointwise", "copy", "embedding", "embedding backward"}
    | {"normalisation", "normalisation backward", "softmax", "softmax backward", "reduction", "reduction backward"}
    | {"matmul, fp32", "matmul, tf32", "matmul, half"}
    | {
        f"{layer}{backward}, {dtype}"
        for layer in ("attention", "convolution", "recurrent")
        for backward in ("", " backward")
        for dtype in ("fp32", "half")
    }
)


def _arithmetic(one: Operator, *, tf32: bool) -> str:
    """KeyError for a dtype of which no rate is known."""
    if one.dtype in ("float64", "complex64", "complex128"):
        raise KeyError(one.dtype)
    if one.half:
        return "bf16" if one.dtype == "bfloat16" else "fp16"
    if one.operator_class == "attention":
        return "fp32"  # its fused kernel for fp32 took as long with TF32 as without
    return "tf32" if tf32 or one.operator_class in ("convolution", "recurrent") else "fp32"


def _peak(gpu: GpuEntry, dtype: str) -> float:
    """Where TF32 is no faster, it has no figure of its own."""
    rates = gpu.flops_per_second
    return rates["fp32"] if dtype == "tf32" and "tf32" not in rates else rates[dtype]


def _is_aligned(one: Operator) -> bool:
    """Of the last two sizes of each matrix of a 16-bit product."""
    if not one.half or one.operator_class != "matmul":
        return True
    return all(size % ALIGNED == 0 for shape in one.shapes if len(shape) > 1 for size in shape[-2:])


H100 = GpuModel(
    rates={
        "attention backward, fp32": Rate(2.7e-05, 0.758),
        "attention backward, half": Rate(1e-05, 0.401),
        "attention, fp32": Rate(9.9e-06, 0.681),
        "attention, half": Rate(4.7e-06, 0.708),
        "batch norm": Rate(1.6e-06, 0.432),
        "batch norm, half": Rate(4.3e-06, 0.202),
        "convolution backward, fp32": Rate(1.7e-05, 0.381),
        "convolution backward, half": Rate(1.4e-05, 0.352),
        "convolution, fp32": Rate(7.1e-06, 0.619),
        "convolution, half": Rate(5.6e-06, 0.408),
        "copy": Rate(9.9e-07, 0.504),
        "embedding": Rate(2.9e-07, 1.52),
        "embedding backward": Rate(1.1e-05, 0.293),
        "matmul, fp32": Rate(6.7e-06, 0.712),
        "matmul, half": Rate(3.1e-06, 0.72),
        "matmul, tf32": Rate(4.4e-06, 0.572),
        "normalisation": Rate(2.9e-06, 0.62),
        "normalisation backward": Rate(4.7e-06, 0.369),
        "optimizer": Rate(9.1e-06, 0.86),
        "pointwise": Rate(2.9e-07, 1.52),
        "recurrent backward, fp32": Rate(1.6e-05, UNBOUND_SHARE),
        "recurrent backward, half": Rate(5.5e-06, 0.0562),
        "recurrent, fp32": Rate(7.2e-06, UNBOUND_SHARE),
        "recurrent, half": Rate(4.6e-06, 0.121),
        "reduction": Rate(4.5e-06, 0.405),
        "reduction backward": Rate(4.5e-06, 0.297),
        "softmax": Rate(1.3e-06, 0.544),
        "softmax backward": Rate(1.2e-06, 0.712),
    },
    host_seconds={"forward": 6.8e-05, "backward": 3.5e-05, "optimizer": 1.1e-04, "time step": 3.0e-05},
)
"""The host: a virtual machine of 16 cores of an Intel Xeon, torch 2.11, Flatout's TrainStep."""
