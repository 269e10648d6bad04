"""One rank's part of a tensor that is cut over ranks, the whole of it from the parts, and what ranks exchange of
activations while each computes a part of a layer, with the gradients of that.

A matrix of queries, keys and values is three in one: each rank needs a part of each of them.

    [q0 q1 | k0 k1 | v0 v1]   cut in 2, of 3 in one   ->   rank 0: [q0 k0 v0], rank 1: [q1 k1 v1]

A pair of layers is computed without exchange in between: the first gives each rank some of the columns, the second
takes these and gives each rank a term of the result.

    entered     forward: as it is      backward: sum over ranks    before the first layer
    summed      forward: sum           backward: as it is          after the second
    gathered    forward: side by side  backward: own columns       after a last layer, whose columns are needed whole

Sums are the same bits on all ranks, so what is computed from them is too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import Tensor, distributed
from torch.nn import functional as F

from flatout.levers.lazy_scores import NodeContext
from flatout.machine.ranks import pretended_exchange
from flatout.parallel.whole_tensors import CUT

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")
Place = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
all_gather: Callable[..., object] = (
    getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
)
"""Renamed in torch 2.13; a later one may lack the old name."""


class Across:
    """The ranks that share each layer, and this one's place. A copy of a model shares it: groups cannot be copied."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group, self.rank, self.count = group, group.rank(), group.size()

    def __deepcopy__(self, memo: object) -> Across:
        return self

    def of_all(self, value: T) -> list[T]:
        """The value of every rank, in their order; a collective."""
        pretended = pretended_exchange()
        if pretended is not None:
            return pretended.values(value, self.count, self.rank)
        every = [value] * self.count
        distributed.all_gather_object(every, value, group=self.group)
        return every

    def of_rank(self, rank: int, value: T) -> T:
        """The value of one of them, on all; a collective."""
        pretended = pretended_exchange()
        if pretended is not None:
            return pretended.values(value, self.count, self.rank)[rank]
        found = [value]
        distributed.broadcast_object_list(found, distributed.get_global_rank(self.group, rank), self.group)
        return found[0]

    def gathered(self, part: Tensor) -> Tensor:
        """[...] of equal shape on all ranks -> [ranks, ...]; a collective."""
        out = torch.empty(self.count * part.numel(), dtype=part.dtype, device=part.device)
        all_gather(out, part.reshape(-1), group=self.group)
        return out.view(self.count, *part.shape)


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How a tensor is cut over ranks."""

    across: Across
    shape: tuple[int, ...]
    """Of the whole tensor."""
    dim: int
    """Along which it is cut."""
    fused: int = 1
    """Of how many tensors it consists along that dimension, each of which is cut."""

    @property
    def chunk(self) -> int:
        """The size of a part of one of these along the dimension; the last ranks' may be smaller."""
        return -(-self.shape[self.dim] // self.fused // self.across.count)

    @property
    def bounds(self) -> tuple[int, int]:
        """Where this rank's part of each of them begins and ends."""
        size = self.shape[self.dim] // self.fused
        return min(size, self.across.rank * self.chunk), min(size, (self.across.rank + 1) * self.chunk)

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Of this rank's part."""
        first, last = self.bounds
        return (*self.shape[: self.dim], self.fused * (last - first), *self.shape[self.dim + 1 :])

    def places(self, part: torch.Size, offset: tuple[int, ...]) -> list[Place]:
        """Where in the whole tensor lies what of this rank's part begins at `offset` and has the shape `part`: one box,
        or one for each of the tensors of which it consists. Each is (where it begins in `part`, its shape, where it
        begins in the whole)."""
        size, (first, last) = self.shape[self.dim] // self.fused, self.bounds
        found = []
        for number in range(self.fused):
            begin = max(offset[self.dim], number * (last - first))
            end = min(offset[self.dim] + part[self.dim], (number + 1) * (last - first))
            if end > begin and part.numel():
                start, shape, at = [0] * len(part), list(part), list(offset)
                start[self.dim], shape[self.dim] = begin - offset[self.dim], end - begin
                at[self.dim] = number * size + first + begin - number * (last - first)
                found.append((tuple(start), tuple(shape), tuple(at)))
        return found

    def part(self, whole: Tensor) -> Tensor:
        """This rank's part, a copy; `whole` if it has another shape."""
        if tuple(whole.shape) != self.shape:
            return whole
        first, last = self.bounds
        several = whole.unflatten(self.dim, (self.fused, -1))
        part: Tensor = several.narrow(self.dim + 1, first, last - first).flatten(self.dim, self.dim + 1).clone()
        return part

    def whole(self, part: Tensor) -> Tensor:
        """The whole tensor on every rank, a collective; `part` if it has the shape of no part."""
        if tuple(part.shape) != self.part_shape:
            return part
        several = part.detach().unflatten(self.dim, (self.fused, -1))
        missing = self.chunk - several.shape[self.dim + 1]
        if missing:
            several = F.pad(several, (*(0, 0) * (several.dim() - self.dim - 2), 0, missing))
        every = self.across.gathered(several)  # [ranks, ..., fused, chunk, ...]
        joined = torch.cat(tuple(every), self.dim + 1)
        size = self.shape[self.dim] // self.fused
        whole: Tensor = joined.narrow(self.dim + 1, 0, size).flatten(self.dim, self.dim + 1).contiguous()
        return whole


def cut_of(parameter: object) -> Cut | None:
    """How a parameter is cut; None if it is whole."""
    cut: Cut | None = getattr(parameter, CUT, None)
    return cut


class _EnteredContext(NodeContext, Protocol):
    across: Across


class _Entered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _EnteredContext, x: Tensor, across: Across) -> Tensor:
        ctx.across = across
        return x.view_as(x)

    @staticmethod
    def backward(ctx: _EnteredContext, gradient: Tensor) -> tuple[Tensor, None]:
        return _sum(gradient, ctx.across), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor, across: Across) -> Tensor:
        return _sum(x, across)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _GatheredContext(NodeContext, Protocol):
    bounds: tuple[int, int]


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _GatheredContext, x: Tensor, cut: Cut) -> Tensor:
        ctx.bounds = cut.bounds
        size = cut.shape[cut.dim]
        whole = x.new_empty((*x.shape[:-1], size))  # a view could not be changed in place afterwards
        for rank, part in enumerate(cut.across.gathered(F.pad(x, (0, cut.chunk - x.shape[-1])))):
            first, last = rank * cut.chunk, min(size, (rank + 1) * cut.chunk)
            whole[..., first:last] = part[..., : max(0, last - first)]
        return whole

    @staticmethod
    def backward(ctx: _GatheredContext, gradient: Tensor) -> tuple[Tensor, None]:
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
