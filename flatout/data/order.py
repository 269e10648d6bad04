"""The order of the samples: the same for any number of workers and ranks, and any batch size.

An order is a function of (seed, epoch). A position is a number of samples in the whole order, not of one rank's
batches, so a run can resume with another batch size or number of ranks, and neither loses nor repeats a sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
SPREAD = 0x9E3779B97F4A7C15
"""An odd constant (2^64 over the golden ratio) that keeps the generators' seeds of neighbouring epochs apart."""


def epoch_seed(seed: int, epoch: int) -> int:
    """The seed of one epoch's order, below 2^63."""
    return (seed * 1_000_003 + epoch * SPREAD) % (1 << 63)


def epoch_order(length: int, *, seed: int, epoch: int, shuffle: bool) -> Tensor:
    """The indices of one epoch, int64 [length], on the CPU, whatever the default device is."""
    import torch

    if not shuffle:
        return torch.arange(length, device="cpu")
    generator = torch.Generator().manual_seed(epoch_seed(seed, epoch))
    return torch.randperm(length, generator=generator, device="cpu")


def share_of_rank(start: int, stop: int, rank: int, ranks: int) -> tuple[int, int]:
    """The part of samples `start` to `stop` that is this rank's: parts differ by at most one sample."""
    length = stop - start
    return start + length * rank // ranks, start + length * (rank + 1) // ranks


def spans(length: int, position: int, batch_size: int, *, least: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of each batch of all ranks together, from `position` on.

    A last batch of fewer than `least` samples is dropped: with fewer samples than ranks some ranks would have none, and
    hang in the next collective.
    """
    while position < length:
        stop = min(position + batch_size, length)
        if stop - position < least:
            return
        yield position, stop
        position = stop


class OrderInBatches:
    """The order of each epoch, cut into batches of any lengths, which follow from seed and epoch."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self._key: tuple[int, int] | None = None
        self._batches: list[list[int]] = []

    def __call__(self, seed: int, epoch: int) -> Tensor:
        """The indices of an epoch, one batch after the other, int64."""
        import torch

        indices = [index for batch in self.batches(seed, epoch) for index in batch]
        return torch.tensor(indices, dtype=torch.int64, device="cpu")

    def spans(self, seed: int, epoch: int, position: int, *, least: int) -> list[tuple[int, int]]:
        """(start, stop) of each batch from `position` on, which may lie within a batch; without those of fewer than
        `least` samples."""
        found, start = [], 0
        for batch in self.batches(seed, epoch):
            stop = start + len(batch)
            if stop - max(start, position) >= least:
                found.append((max(start, position), stop))
            start = stop
        return found

    def batches(self, seed: int, epoch: int) -> list[list[int]]:
        """The indices of each."""
        if self._key != (seed, epoch):
            self._batches = self._made(seed, epoch)
            self._key = seed, epoch
        return self._batches

    def _made(self, seed: int, epoch: int) -> list[list[int]]:
        raise NotImplementedError
