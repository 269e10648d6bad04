"""The precision of fp32 matmul, through the one interface that torch's other settings do not contradict.

`torch.set_float32_matmul_precision` covers matrix products on every device; convolutions and recurrent layers of
oneDNN have switches of their own, which no older interface touches. A program that sets the newer switches
(`torch.backends.fp32_precision` and those of each backend) may contradict it: torch then refuses to say which precision
it is, and the switches count.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol


class _Switch(Protocol):
    fp32_precision: str


def current_matmul_precision() -> str:
    """'highest', 'high' or 'medium': as `torch.get_float32_matmul_precision`, which may raise, or by the switches."""
    import torch

    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        held = {switch.fp32_precision for switch in _products()}
        return "medium" if "bf16" in held else "high" if "tf32" in held else "highest"


@contextlib.contextmanager
def matmul_precision(value: str) -> Iterator[None]:
    """'highest' = fp32, 'high' = TF32 on CUDA, 'medium' = bf16 inside the product, until the context ends."""
    import torch

    backends = [_onednn().conv, _onednn().rnn] if value == "medium" else []
    # set_float32_matmul_precision writes these as well, and 'highest' does not bring back what they held before.
    products = _products()
    others = [backend.fp32_precision for backend in [*products, *backends]]
    for switch in products:
        switch.fp32_precision = "ieee"  # contradicts no precision: torch says what was set
    try:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(value)
        for backend in backends:
            backend.fp32_precision = "bf16"
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)
    finally:
        for backend, old in zip([*products, *backends], others, strict=True):
            _put_back(backend, old)


def _products() -> list[_Switch]:
    """The switches of matrix products: of CPUs and of CUDA."""
    import torch

    return [_onednn().matmul, torch.backends.cuda.matmul]


def _onednn() -> Any:  # torch replaces the module by an object with these switches
    import torch

    return torch.backends.mkldnn


def _put_back(switch: _Switch, value: str) -> None:
    """A switch that had no value of its own, and said that of torch.backends, has none afterwards either."""
    switch.fp32_precision = "none"
    if switch.fp32_precision != value:
        switch.fp32_precision = value
