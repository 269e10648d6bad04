"""Orders drawn by a DataLoader's sampler, or by its batch sampler; one for each epoch.

Each is drawn from the epoch's own seed, so that a run can resume in the middle of an epoch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sized
from typing import TYPE_CHECKING, TypeVar

from flatout.arguments import wrong
from flatout.data.order import epoch_seed
from flatout.errors import UsageError
from flatout.generators import generators_kept, seed_generators

if TYPE_CHECKING:
    from torch import Generator, Tensor

T = TypeVar("T")


class EpochOrder:
    """The order that a sampler draws."""

    def __init__(self, sampler: Iterable[int]) -> None:
        self._sampler = sampler
        self.samples = length_of(sampler, "the sampler")

    def __call__(self, seed: int, epoch: int) -> Tensor:
        """The indices of an epoch, int64 [samples]."""
        import torch

        return torch.as_tensor(_drawn(self._sampler, seed, epoch))


class BatchOrder:
    """The batches that a batch sampler draws: lists of indices, of any lengths but not shorter than there are ranks.

    The last one of an epoch may be shorter, and is left out then: some ranks would have no sample of it.
    """

    def __init__(self, sampler: Iterable[Iterable[int]], samples: int, ranks: int = 1) -> None:
        self._sampler, self._ranks = sampler, ranks
        self.samples = samples
        self._epoch: tuple[int, int] | None = None
        self._batches: list[list[int]] = []

    def __call__(self, seed: int, epoch: int) -> Tensor:
        """The indices of an epoch, one batch after the other."""
        import torch

        return torch.as_tensor([index for batch in self._of(seed, epoch) for index in batch], dtype=torch.int64)

    def spans(self, seed: int, epoch: int, position: int) -> list[tuple[int, int]]:
        """(start, stop) of each batch of the epoch from `position` on, which may lie within a batch."""
        found, start = [], 0
        for batch in self._of(seed, epoch):
            stop = start + len(batch)
            if stop - max(start, position) >= self._ranks:
                found.append((max(start, position), stop))
            start = stop
        return found

    def left_out(self, seed: int, epoch: int) -> Tensor | None:
        """The indices of the last batch, if it has fewer samples than there are ranks."""
        import torch

        last = (self._of(seed, epoch) or [[]])[-1]
        return torch.as_tensor(last, dtype=torch.int64) if 0 < len(last) < self._ranks else None

    def _of(self, seed: int, epoch: int) -> list[list[int]]:
        if (seed, epoch) != self._epoch:
            self._epoch, self._batches = (seed, epoch), [list(one) for one in _drawn(self._sampler, seed, epoch)]
            if not all(self._batches):
                raise UsageError("the batch sampler made an empty batch", limit="a batch has at least one sample")
            if (least := min(map(len, self._batches[:-1]), default=self._ranks)) < self._ranks:
                raise UsageError(
                    f"the batch sampler made a batch of {least} for {self._ranks} ranks",
                    limit="each rank has at least one sample of each batch but the last",
                    remedy="make larger batches",
                )
        return self._batches


def length_of(value: object, name: str) -> int:
    """As len(). torch declares neither its samplers nor its data sets as having a length."""
    if not isinstance(value, Sized):
        raise wrong(name, value, "it has a length", "give its class __len__")
    return len(value)


def _drawn(sampler: Iterable[T], seed: int, epoch: int) -> list[T]:
    """What a sampler yields in this epoch: its own generators, and the global ones, start from the epoch's seed."""
    with generators_kept(), contextlib.ExitStack() as kept:
        seed_generators(epoch_seed(seed, epoch))
        for generator in _generators_of(sampler):
            kept.callback(generator.set_state, generator.get_state())
            generator.manual_seed(epoch_seed(seed, epoch))
        for one in samplers_in(sampler):
            if callable(set_epoch := getattr(one, "set_epoch", None)):
                set_epoch(epoch)
        return list(sampler)


def samplers_in(sampler: object) -> Iterator[object]:
    """A sampler, and those that it draws from."""
    while sampler is not None:
        yield sampler
        sampler = getattr(sampler, "sampler", None)


def _generators_of(sampler: object) -> Iterator[Generator]:
    import torch

    for one in samplers_in(sampler):
        if isinstance(generator := getattr(one, "generator", None), torch.Generator):
            yield generator
