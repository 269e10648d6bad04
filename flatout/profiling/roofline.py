"""Classes of operators against the measured ceilings of the machine, and the share of products on matrix units.

Below a certain number of FLOPs per byte an operator cannot be faster than memory delivers; above it, than the
processor computes. Which ceiling binds follows from that ratio, and the share of it that was reached is the distance
to what is possible. Bytes count every argument and result once, as if nothing stayed in caches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from flatout.machine.ceilings import Ceilings, Peak
from flatout.machine.description import Machine
from flatout.profiling.operator_classes import PRODUCTS
from flatout.profiling.profile import (
    KernelRow,
    MatrixUnits,
    OperatorClass,
    OperatorRow,
    RooflineRow,
    known_sum,
    sizes_in,
)
from flatout.units import format_seconds

SHORT_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "int8": "int8", "float64": "fp64"}
_SHORT_CALL_SECONDS, _LOW_SHARE = 10e-6, 0.5
ABOVE = {
    "memory": "above memory's rate: these tensors stay in the caches",
    "compute": "above the rate that was measured: it is too low, or not all that was counted is computed, as where a "
    "mask is causal; measure again with flatout check --measure",
}
"""What a share beyond 100 % says."""
_ALIGNED = 8
"""Of 16-bit products on Tensor Cores, sizes are multiples of this."""
_UNIT_KERNELS = ("tensorop", "hmma", "wgmma", "gmma", "s16816", "s1688", "s884", "xmma", "mma_", "h884", "nvjet")
_PLAIN_KERNELS = ("simt", "sgemm", "ffma")


def roofline(
    operators: Sequence[OperatorRow], ceilings: Ceilings | None, *, device: str, tf32: bool = False
) -> tuple[RooflineRow, ...]:
    """Longest first. device: where the steps ran: other devices' ceilings do not bind them. tf32: may fp32 products
    run as TF32?"""
    total = sum(row.seconds for row in operators) or 1.0
    known, reason = _known(ceilings, device)
    classes: dict[tuple[OperatorClass, str], list[OperatorRow]] = {}
    for one in operators:
        dtype = _short(one.dtype, tf32) if one.operator_class in PRODUCTS else ""
        classes.setdefault((one.operator_class, dtype), []).append(one)
    rows = [_row(kind, dtype, of_class, total, known, reason) for (kind, dtype), of_class in classes.items()]
    return tuple(sorted(rows, key=lambda row: -row.seconds))


def _known(ceilings: Ceilings | None, device: str) -> tuple[Ceilings | None, str]:
    if ceilings is None:
        return None, "unknown, because this machine's ceilings were not measured (flatout check --measure)"
    if ceilings.device != device:
        return None, f"unknown, because the ceilings of {ceilings.device} were measured, and the steps ran on {device}"
    return ceilings, ""


def _short(dtype: str, tf32: bool) -> str:
    short = SHORT_DTYPES.get(dtype, dtype)
    return "tf32" if short == "fp32" and tf32 else short


def _row(
    kind: OperatorClass, dtype: str, rows: Sequence[OperatorRow], total: float, ceilings: Ceilings | None, reason: str
) -> RooflineRow:
    """Operators whose FLOPs, or bytes, are unknown say nothing of a rate."""
    seconds, calls = sum(row.seconds for row in rows), sum(row.calls for row in rows)
    flops, size = known_sum(*(row.flops for row in rows)), known_sum(*(row.bytes for row in rows))
    attained = _rate(flops, sum(row.seconds for row in rows if row.flops))
    moved = _rate(size, sum(row.seconds for row in rows if row.bytes))
    bound: Literal["compute", "memory"] | None = None
    name, ceiling, share = "", None, None
    if ceilings is not None:
        compute = ceilings.gemm_flops_per_second.get(dtype) if flops else None
        memory = ceilings.memory_copy_bytes_per_second or ceilings.memory_read_bytes_per_second
        bound = _bound(flops, size, compute, memory)
        if bound == "compute" and compute is not None and attained is not None:
            name, ceiling, share = f"{dtype} products", compute.value, attained / compute.value
        elif bound == "memory" and memory is not None and moved is not None:
            name, ceiling, share = "memory copy", memory.value, moved / memory.value
        elif flops and compute is None:
            rate = f"the {dtype} rate" if dtype else "the rate"
            reason = f"unknown, because {rate} of this device was not measured"
        else:
            reason = "unknown, because neither FLOPs nor bytes of these operators were counted"
        if share is not None and share > 1:
            reason = ABOVE[bound or "compute"]
        elif share is not None and share < _LOW_SHARE and calls and seconds / calls < _SHORT_CALL_SECONDS:
            reason = f"calls of {format_seconds(seconds / calls)} are mostly the cost of a call"
    return RooflineRow(
        operator_class=kind,
        dtype=dtype,
        seconds=seconds,
        share=seconds / total,
        flops=flops,
        bytes=size,
        attained_flops_per_second=attained,
        attained_bytes_per_second=moved,
        bound=bound,
        ceiling_name=name,
        ceiling=ceiling,
        share_of_ceiling=share,
        reason=reason,
        calls=calls,
    )


def _rate(count: float | None, seconds: float) -> float | None:
    return count / seconds if count and seconds else None


def _bound(
    flops: float | None, size: float | None, compute: Peak | None, memory: Peak | None
) -> Literal["compute", "memory"] | None:
    """The ceiling under which the time would be longest."""
    if flops and compute is None:
        return None
    by_compute = flops / compute.value if flops and compute is not None else 0.0
    by_memory = size / memory.value if size and memory is not None else 0.0
    if not by_compute and not by_memory:
        return None
    return "compute" if by_compute >= by_memory else "memory"


def matrix_units(
    operators: Sequence[OperatorRow], kernels: Sequence[KernelRow], machine: Machine, *, device: str, tf32: bool = False
) -> MatrixUnits | None:
    """None: there were no products. On a GPU the names of the kernels decide where they say it, else the dtype does.

    tf32: does torch.set_float32_matmul_precision allow fp32 products to be computed in fewer bits?
    """
    products = [row for row in operators if row.operator_class in PRODUCTS and row.flops and row.seconds > 0]
    if not products:
        return None
    total = sum(row.seconds for row in products)
    on_gpu = device.startswith("cuda")
    unit, dtypes = _gpu_unit(machine, device) if on_gpu else _cpu_unit(machine)
    by_kernel = _kernel_verdicts(kernels) if on_gpu else {}
    if not unit:
        return MatrixUnits(unit="", product_seconds=total, reason="this device has no matrix units")
    if tf32 and not on_gpu and any(_short(row.dtype, False) == "fp32" for row in products):
        why = "set_float32_matmul_precision lets oneDNN compute fp32 products in bf16, and nothing says which it does"
        return MatrixUnits(unit=unit, product_seconds=total, reason=why)
    rest: dict[str, float] = {}
    for row in products:
        why = by_kernel.get(row.name) or _why_not(row, unit, dtypes, tf32, on_gpu=on_gpu)
        if why and why != _ON_UNITS:
            rest[why] = rest.get(why, 0.0) + row.seconds
    on_units = total - sum(rest.values())
    return MatrixUnits(
        unit=unit,
        product_seconds=total,
        seconds_on_units=on_units,
        share=on_units / total,
        rest=tuple(sorted(rest.items(), key=lambda item: -item[1])),
    )


_ON_UNITS = "on units"


def _kernel_verdicts(kernels: Sequence[KernelRow]) -> Mapping[str, str]:
    """Operator -> what the name of its longest kernel says; operators whose kernels say nothing are left out."""
    found: dict[str, str] = {}
    for row in sorted(kernels, key=lambda one: one.seconds):
        name = row.name.lower()
        if any(word in name for word in _PLAIN_KERNELS):
            found[row.operator] = f"its kernel does not use them ({row.name[:60]})"
        elif any(word in name for word in _UNIT_KERNELS):
            found[row.operator] = _ON_UNITS
    return found


_CPU_UNITS = (
    ("AMX", {"amx_bf16": "bf16", "amx_fp16": "fp16", "amx_int8": "int8"}),
    ("AVX-512 BF16/VNNI", {"avx512_bf16": "bf16", "avx512_vnni": "int8"}),
    ("AVX-VNNI", {"avx_vnni": "int8"}),
)
"""From the fastest: (name, feature -> dtype whose products it computes)."""


def _cpu_unit(machine: Machine) -> tuple[str, frozenset[str]]:
    for name, dtypes in _CPU_UNITS:
        found = frozenset(dtype for feature, dtype in dtypes.items() if feature in machine.cpu.features)
        if found:
            return name, found
    return "", frozenset()


def _gpu_unit(machine: Machine, device: str) -> tuple[str, frozenset[str]]:
    gpu = machine.gpu(device)
    capability = gpu.compute_capability if gpu is not None else None
    if capability is None or capability < (7, 0):
        return "", frozenset()
    dtypes = {"fp16"} if capability < (8, 0) else {"fp16", "bf16", "tf32", "int8"}
    return "Tensor Cores", frozenset(dtypes)


def _why_not(row: OperatorRow, unit: str, dtypes: frozenset[str], tf32: bool, *, on_gpu: bool) -> str:
    dtype = _short(row.dtype, tf32)
    if dtype not in dtypes:
        return f"{dtype or 'unknown dtype'}: {unit} here takes {', '.join(sorted(dtypes))}"
    if on_gpu and dtype in ("fp16", "bf16") and not _is_aligned(row.shapes):
        return f"{dtype}: sizes are not multiples of {_ALIGNED}"
    return ""


def _is_aligned(shapes: str) -> bool:
    """Of the last sizes of matrices; unknown shapes count as aligned."""
    return all(size % _ALIGNED == 0 for sizes in sizes_in(shapes) if len(sizes) > 1 for size in sizes[-2:])
