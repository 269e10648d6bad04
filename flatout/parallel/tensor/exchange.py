"""Activations that ranks exchange while each computes a part of a layer, with the gradients of that.

A pair of layers is computed without exchange in between: the first gives each rank some of the columns, the second
takes these and gives each rank a term of the result.

    entered     forward: as it is      backward: sum over ranks    before the first layer
    summed      forward: sum           backward: as it is          after the second
    gathered    forward: side by side  backward: own columns       after a last layer, whose columns are needed whole

Sums are the same bits on all ranks, so what is computed from them is too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn import functional as F

from flatout.parallel.tensor.parts import Across, Cut


class _Entered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, across: Across) -> Tensor:  # ctx: as torch has it, here and below
        ctx.across = across
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _sum(gradient, ctx.across), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, across: Across) -> Tensor:
        return _sum(x, across)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: Cut) -> Tensor:
        ctx.bounds = cut.bounds
        size = cut.shape[cut.dim]
        whole = x.new_empty((*x.shape[:-1], size))  # a view could not be changed in place afterwards
        for rank, part in enumerate(cut.across.gathered(F.pad(x, (0, cut.chunk - x.shape[-1])))):
            first, last = rank * cut.chunk, min(size, (rank + 1) * cut.chunk)
            whole[..., first:last] = part[..., : max(0, last - first)]
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        first, last = ctx.bounds
        return gradient[..., first:last], None


def _sum(x: Tensor, across: Across) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    distributed.all_reduce(total, group=across.group)
    return total


def entered(x: Tensor, across: Across) -> Tensor:
    """The same values on all ranks, about to be used by each for its part."""
    out: Tensor = _Entered.apply(x, across)  # type: ignore[no-untyped-call]  # as torch has it, here and below
    return out


def summed(x: Tensor, across: Across) -> Tensor:
    """The sum of the ranks' terms."""
    out: Tensor = _Summed.apply(x, across)  # type: ignore[no-untyped-call]
    return out


def gathered(x: Tensor, cut: Cut) -> Tensor:
    """Columns of all ranks, from this rank's; `cut`: of the weight that made them."""
    out: Tensor = _Gathered.apply(x, cut)  # type: ignore[no-untyped-call]
    return out
