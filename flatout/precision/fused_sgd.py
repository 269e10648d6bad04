"""An SGD with fused=True on 16-bit weights of a CPU, which torch does not train.

Its kernel does not store what it computes there, but for the few elements that fill no vector
(https://github.com/pytorch/pytorch/issues/191763, in torch 2.12 and 2.13). So the kernel is tried once for each type.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.optim import Optimizer

ELEMENTS = 64
"""At least a vector of every processor."""


def types_lost_if_fused(parameters: Iterable[Tensor]) -> set[torch.dtype]:
    """Types of those whose updates an SGD would lose if it were built with fused=True."""
    in_16_bits = {one.dtype for one in parameters if one.is_cpu and one.dtype.itemsize == 2}
    return {dtype for dtype in in_16_bits if not _stores_updates(dtype)}


def types_lost_by(optimizer: Optimizer) -> set[torch.dtype]:
    """Types of weights whose updates an optimizer loses, because it is an SGD that was built with fused=True."""
    import torch

    if type(optimizer) is not torch.optim.SGD:
        return set()
    return types_lost_if_fused(one for group in optimizer.param_groups if group.get("fused") for one in group["params"])


@functools.cache
def _stores_updates(dtype: torch.dtype) -> bool:
    """In a thread of its own, as torch's modes belong to threads: under one, tensors may be fake."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_updates_a_tensor, dtype).result()


def _updates_a_tensor(dtype: torch.dtype) -> bool:
    import torch
    from torch.optim.sgd import sgd

    weight, gradient = (make(ELEMENTS, dtype=dtype, device="cpu") for make in (torch.zeros, torch.ones))
    with torch.no_grad():
        sgd(
            [weight],
            [gradient],
            [None],
            fused=True,
            foreach=False,
            lr=1.0,
            momentum=0.0,
            dampening=0.0,
            weight_decay=0.0,
            nesterov=False,
            maximize=False,
        )
    return bool((weight == -1).all())
