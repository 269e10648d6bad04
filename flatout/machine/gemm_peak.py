"""The arithmetic ceiling: square matrix products, which are limited by nothing else.

Too small a product waits for memory and launches; so sizes grow until the next would take too long, and the best
counts. Every dtype starts small: without its own instructions it may be 1000x slower than with them, and then the
small size is all that is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from flatout.machine.ceilings import Peak
from flatout.machine.probe import peak_of, timed
from flatout.timing import Measurement

CPU_DTYPES = ("fp32", "bf16", "fp16", "int8")
CUDA_DTYPES = ("fp32", "tf32", "bf16", "fp16", "int8")
_CPU_SIZES = (256, 512, 1024, 2048, 4096)
_CUDA_SIZES = (256, 1024, 2048, 4096, 8192, 16384)
# A size is tried only if the last one's speed promises that a product takes at most this share of the dtype's time, or
# this long: on a busy machine every small product takes 8 ms, which says nothing of a larger one.
_LARGEST_SHARE = 1 / 10
_ALWAYS_SECONDS = 0.15


def gemm_peak(dtype: str, device: str, seconds: float) -> tuple[Peak | None, str]:
    """The best over growing sizes, in about that time; or None and why."""
    best: Peak | None = None
    last_rate: float | None = None
    for size in _CUDA_SIZES if device == "cuda" else _CPU_SIZES:
        work = 2 * size**3
        if last_rate is not None and work / last_rate > max(_ALWAYS_SECONDS, seconds * _LARGEST_SHARE):
            break
        try:
            found = _time_product(size, dtype, device, seconds / 4)
        except RuntimeError as error:  # torch raises it for 'not on this device' and 'not enough memory' alike
            return best, "" if best else str(error).splitlines()[0]
        peak = peak_of(found, work, "OP/s" if dtype == "int8" else "FLOP/s", f"{size} x {size} x {size}")
        last_rate = peak.high
        best = peak if best is None or peak.value > best.value else best
    return best, ""


def _time_product(size: int, dtype: str, device: str, seconds: float) -> Measurement:
    with _float32_precision("tf32" if dtype == "tf32" else "ieee"):
        return timed(_product(size, dtype, device), device, seconds)


def _product(size: int, dtype: str, device: str) -> Callable[[], object]:
    import torch

    from flatout.torch_private.tensors import int_mm

    generator = torch.Generator(device=device).manual_seed(0)
    if dtype == "int8":
        a, b = (
            torch.randint(-64, 64, (size, size), dtype=torch.int8, device=device, generator=generator) for _ in "ab"
        )
        # A GPU multiplies integers at full speed only where both are read along their rows (cuBLASLt's "TN").
        second = b.t() if device == "cuda" else b
        return lambda: int_mm(a, second)  # torch has no public product of integers
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype, torch.float32)
    # Random values: zeros draw less power, and a GPU below its power limit is faster than in real work.
    a, b = (torch.randn(size, size, device=device, generator=generator).to(kind) for _ in "ab")
    out = torch.empty(size, size, dtype=kind, device=device)
    return lambda: torch.mm(a, b, out=out)


@contextmanager
def _float32_precision(precision: str) -> Iterator[None]:
    """How the GPU multiplies fp32, during the probe."""
    import torch

    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = precision
    try:
        yield
    finally:
        matmul.fp32_precision = before
