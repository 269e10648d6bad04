"""One rank's part of a tensor that is cut over ranks, and the whole of it from the parts.

A matrix of queries, keys and values is three in one: each rank needs a part of each of them.

    [q0 q1 | k0 k1 | v0 v1]   cut in 2, of 3 in one   ->   rank 0: [q0 k0 v0], rank 1: [q1 k1 v1]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, distributed

from flatout.parallel.whole_tensors import CUT

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


_all_gather: Callable[..., object] = getattr(distributed, "all_gather_single", distributed.all_gather_into_tensor)
"""Renamed in torch 2.13."""


class Across:
    """The ranks that share each layer, and this one's place. A copy of a model shares it: groups cannot be copied."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group, self.rank, self.count = group, group.rank(), group.size()

    def __deepcopy__(self, memo: object) -> Across:
        return self

    def gathered(self, part: Tensor) -> Tensor:
        """[...] of equal shape on all ranks -> [ranks, ...]; a collective."""
        out = torch.empty(self.count * part.numel(), dtype=part.dtype, device=part.device)
        _all_gather(out, part.reshape(-1), group=self.group)
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
            several = torch.cat((several, several.new_zeros(_with(several.shape, self.dim + 1, missing))), self.dim + 1)
        every = self.across.gathered(several)  # [ranks, ..., fused, chunk, ...]
        joined = torch.cat(tuple(every), self.dim + 1)
        size = self.shape[self.dim] // self.fused
        whole: Tensor = joined.narrow(self.dim + 1, 0, size).flatten(self.dim, self.dim + 1).contiguous()
        return whole


def _with(shape: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


def cut_of(parameter: object) -> Cut | None:
    """How a parameter is cut; None if it is whole."""
    cut: Cut | None = getattr(parameter, CUT, None)
    return cut
