"""What the makers of GPUs publish: a ceiling where none was measured, named as such, never a stand-in for another.

Convention: **dense** products (data sheets like to print the figure with 2:4 sparsity, twice as high), matrix units,
accumulation in fp32 where the maker states several, boost clock. Memory: the peak of the bus. Looked up by the exact
name that the driver gives, because a laptop's "4090" is another chip.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

CONVENTION = "dense, fp32 accumulation, boost clock"

_H100 = "NVIDIA H100 data sheet (sparse figures halved)"
_H200 = "NVIDIA H200 data sheet (sparse figures halved)"
_A100 = "NVIDIA A100 data sheet"
_ADA = "NVIDIA Ada GPU architecture white paper, appendix A"


@dataclass(frozen=True, kw_only=True)
class PublishedPeaks:
    """One product's figures, with where they come from. int8 counts integer operations."""

    flops_per_second: Mapping[str, float]  # by dtype; a dtype that is missing has no published figure
    memory_bytes_per_second: float
    source: str
    convention: str = CONVENTION


def _gpu(source: str, memory_gigabytes: float, /, **tera: float) -> PublishedPeaks:
    return PublishedPeaks(
        flops_per_second={dtype: value * 1e12 for dtype, value in tera.items()},
        memory_bytes_per_second=memory_gigabytes * 1e9,
        source=source,
    )


def _a100(memory_gigabytes: float) -> PublishedPeaks:
    return _gpu(_A100, memory_gigabytes, fp32=19.5, tf32=156, bf16=312, fp16=312, int8=624)


def _table() -> dict[str, PublishedPeaks]:
    hopper_sxm = {"fp32": 67, "tf32": 494.5, "bf16": 989.5, "fp16": 989.5, "fp8": 1979, "int8": 1979}
    hopper_nvl = {"fp32": 60, "tf32": 417.5, "bf16": 835.5, "fp16": 835.5, "fp8": 1670.5, "int8": 1670.5}
    volta = "NVIDIA V100 data sheet"
    return {
        "NVIDIA H200": _gpu(_H200, 4800, **hopper_sxm),
        "NVIDIA H200 NVL": _gpu(_H200, 4800, **hopper_nvl),
        "NVIDIA H100 80GB HBM3": _gpu(_H100, 3350, **hopper_sxm),
        "NVIDIA H100 NVL": _gpu(_H100, 3900, **hopper_nvl),
        "NVIDIA H100 PCIe": _gpu(_H100, 2000, fp32=51, tf32=378, bf16=756.5, fp16=756.5, fp8=1513, int8=1513),
        "NVIDIA A100-SXM4-80GB": _a100(2039),
        "NVIDIA A100 80GB PCIe": _a100(1935),
        "NVIDIA A100-SXM4-40GB": _a100(1555),
        "NVIDIA A100-PCIE-40GB": _a100(1555),
        "NVIDIA L4": _gpu(
            "NVIDIA L4 data sheet (sparse figures halved)", 300, fp32=30.3, tf32=60, bf16=121, fp16=121, fp8=242.5,
            int8=242.5,
        ),
        "NVIDIA L40S": _gpu(
            "NVIDIA L40S data sheet", 864, fp32=91.6, tf32=183, bf16=362.05, fp16=362.05, fp8=733, int8=733
        ),
        "NVIDIA GeForce RTX 4090": _gpu(
            _ADA, 1008, fp32=82.6, tf32=82.6, bf16=165.2, fp16=165.2, fp8=330.3, int8=660.6
        ),
        "NVIDIA GeForce RTX 3090": _gpu(
            "NVIDIA GA102 white paper, appendix A", 936, fp32=35.6, tf32=35.6, bf16=71, fp16=71, int8=284
        ),
        "Tesla T4": _gpu("NVIDIA T4 data sheet", 320, fp32=8.1, fp16=65, int8=130),
        "Tesla V100-SXM2-16GB": _gpu(volta, 900, fp32=15.7, fp16=125),
        "Tesla V100-SXM2-32GB": _gpu(volta, 900, fp32=15.7, fp16=125),
        "Tesla V100-PCIE-16GB": _gpu(volta, 900, fp32=14, fp16=112),
        "Tesla V100-PCIE-32GB": _gpu(volta, 900, fp32=14, fp16=112),
    }  # fmt: skip


def published_peaks(gpu_name: str) -> tuple[PublishedPeaks | None, str]:
    """The figures of that GPU and their source; or None and why there are none."""
    found = _table().get(gpu_name)
    if found is None:
        return None, f"no published figures for {gpu_name!r} are in the table; measure: flatout check --measure"
    return found, found.source
