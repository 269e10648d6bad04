"""What a user may have set for new tensors, and what code that computes with tensors of its own must not depend on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def odd_defaults() -> Iterator[None]:
    """fp64, on a device that holds no values: it stands for a GPU."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(before)
