"""The precision of fp32 matmul, through the one interface that torch's other settings do not contradict.

`torch.set_float32_matmul_precision` covers matrix products on every device; convolutions and recurrent layers of
oneDNN have switches of their own, which no older interface touches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol


class _Switch(Protocol):
    fp32_precision: str


@contextlib.contextmanager
def matmul_precision(value: str) -> Iterator[None]:
    """'highest' = fp32, 'high' = TF32 on CUDA, 'medium' = bf16 inside the product, until the context ends."""
    import torch

    onednn: Any = torch.backends.mkldnn  # torch replaces the module by an object with these switches
    backends = [onednn.conv, onednn.rnn] if value == "medium" else []
    # set_float32_matmul_precision writes these two as well, and 'highest' does not bring back what they held before.
    products: list[_Switch] = [onednn.matmul, torch.backends.cuda.matmul]
    before = torch.get_float32_matmul_precision()
    others = [backend.fp32_precision for backend in [*products, *backends]]
    torch.set_float32_matmul_precision(value)
    for backend in backends:
        backend.fp32_precision = "bf16"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        for backend, old in zip([*products, *backends], others, strict=True):
            backend.fp32_precision = old
