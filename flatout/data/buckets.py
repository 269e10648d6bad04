"""Batches of samples of similar lengths, so that little is padded; as many samples as a budget of tokens allows.

An epoch's samples are shuffled and cut into pools of some fifty batches. Within a pool they are sorted by length and
cut into batches, and the batches of the whole epoch are shuffled. All of that follows from seed, epoch and lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from flatout.arguments import as_function, as_whole_number, wrong
from flatout.data.order import OrderInBatches, epoch_order, epoch_seed, share_of_rank
from flatout.data.sources import is_indexed
from flatout.errors import UsageError
from flatout.generators import generators_kept

if TYPE_CHECKING:
    from torch import Tensor

Lengths: TypeAlias = "Callable[..., int] | Sequence[int] | Tensor"
"""A function of a sample, or the lengths of all samples."""
POOL_BATCHES = 50
"""More of them pad less, but make the order less random."""


class BucketOrder(OrderInBatches):
    """Batches of similar lengths."""

    def __init__(
        self, lengths: list[int], tokens: int | None, batch_size: int | None, *, shuffle: bool, ranks: int
    ) -> None:
        super().__init__(len(lengths))
        self.rule: dict[str, int | None] = {"tokens": tokens, "batch_size": batch_size, "total_length": sum(lengths)}
        """What the order depends on besides seed and epoch."""
        self._lengths, self._tokens, self._shuffle = lengths, tokens, shuffle
        self._most = batch_size if batch_size is not None else self.samples
        longest = max(lengths)
        if tokens is not None and longest * ranks > tokens:
            each = f" for each of {ranks} ranks" if ranks > 1 else ""
            raise UsageError(
                f"the longest sample has {longest} tokens, and tokens is {tokens}",
                limit=f"a batch holds at least one sample{each}",
                remedy=f"pass tokens={longest * ranks} or more, or cut the samples",
            )
        typical = (
            self._most if tokens is None else min(self._most, max(1, tokens * self.samples // max(1, sum(lengths))))
        )
        self._pool = POOL_BATCHES * typical
        shortest = max(1, min(lengths))
        self.largest_batch = max(ranks, self._most if tokens is None else min(self._most, tokens // shortest))
        """The most samples that a batch could have."""

    def padding_share(self, seed: int, epoch: int, ranks: int, *, least: int) -> float:
        """Each rank pads its part of a batch by itself."""
        filled = places = 0
        for batch in self.batches(seed, epoch):
            if len(batch) < least:
                continue
            for rank in range(ranks):
                start, stop = share_of_rank(0, len(batch), rank, ranks)
                lengths = [self._lengths[index] for index in batch[start:stop]]
                filled, places = filled + sum(lengths), places + len(lengths) * max(lengths)
        return 1 - filled / places if places else 0.0

    def _made(self, seed: int, epoch: int) -> list[list[int]]:
        import torch

        order = epoch_order(self.samples, seed=seed, epoch=epoch, shuffle=self._shuffle).tolist()
        pools = (order[start : start + self._pool] for start in range(0, self.samples, self._pool))
        batches = self._cut([index for pool in pools for index in sorted(pool, key=self._lengths.__getitem__)])
        if not self._shuffle:
            return batches
        generator = torch.Generator().manual_seed(epoch_seed(epoch_seed(seed, epoch), 1))
        return [batches[i] for i in torch.randperm(len(batches), generator=generator, device="cpu").tolist()]

    def _cut(self, order: list[int]) -> list[list[int]]:
        batches: list[list[int]] = []
        batch: list[int] = []
        longest = 0
        for index in order:
            padded = max(longest, self._lengths[index])
            full = len(batch) >= self._most or (self._tokens is not None and padded * (len(batch) + 1) > self._tokens)
            if batch and full:
                batches.append(batch)
                batch, padded = [], self._lengths[index]
            batch.append(index)
            longest = padded
        return [*batches, batch]


def as_tokens(tokens: object, length: object, *, drop_last: bool) -> int | None:
    """`tokens`, if it fits what is given with it."""
    if tokens is None:
        return None
    tokens = as_whole_number(tokens, "tokens")
    if length is None:
        remedy = "pass length=len, length=lambda sample: len(sample[0]), or the lengths of all samples"
        raise UsageError(f"tokens is {tokens}", limit="a budget of tokens needs the samples' lengths", remedy=remedy)
    if drop_last:
        raise UsageError(
            "drop_last is given together with tokens",
            limit="batches then differ in their number of samples anyway",
            remedy="leave it out",
        )
    return tokens


def lengths_of(data: object, length: object) -> list[int]:
    """The length of each sample. A function is called once per sample; the random generators keep their states."""
    found: object
    if callable(length):
        limit, remedy = "it is called with a sample and returns its length", "pass length=len"
        as_function(length, "length", 1, limit=limit, remedy=remedy)
        if not is_indexed(data) or isinstance(data, tuple | dict):
            raise wrong(
                "data", data, "length needs a data set, or a list of samples", "give the lengths of all samples"
            )
        with generators_kept():
            found = [length(data[i]) for i in range(len(data))]
    else:
        found = length.tolist() if hasattr(length, "tolist") else length
    if not isinstance(found, list | tuple):
        raise wrong("length", length, "it is a function of a sample, or the lengths of all samples", "pass length=len")
    odd = next((one for one in found if isinstance(one, bool) or not hasattr(one, "__index__") or int(one) < 0), None)
    if odd is not None:
        raise wrong("a sample's length", odd, "it is a whole number from 0")
    return [int(one) for one in found]
