"""Which samples make a batch, and the order in which torch's own samplers draw them.

A RandomSampler draws one permutation; torch cuts it number by number into lists, which whole-batch fetching would have
to turn into tensors again. `LoaderOrder` draws what torch's samplers draw, at the same moments and from the same
generators, and hands out the same lists; with each it keeps the slice of the permutation that the list is made from.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable, Iterator, Sequence
from types import CodeType, FunctionType, GeneratorType
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import sampler as samplers

from flatout.torch_private.loading import batch_sampler_of, order_of

if TYPE_CHECKING:
    from torch.utils.data.dataloader import _BaseDataLoaderIter


class NotWholeBatch(Exception):
    """The samples have to be fetched one by one; the message says why."""


class Indices:
    """The samples of one batch, as the list that a data set gets and as a tensor.

    tensor: it holds `numbers`, and these are all in 0 ... below - 1.
    """

    __slots__ = ("_below", "_tensor", "numbers")

    def __init__(self, numbers: Sequence[int], tensor: Tensor | None = None, below: int | None = None) -> None:
        self.numbers, self._tensor, self._below = numbers, tensor, below

    def within(self, length: int) -> Tensor:
        """Int64 [batch] on the CPU: their rows in a tensor of `length` rows; none is negative.

        Raises NotWholeBatch for anything but plain ints (True is no row number), and IndexError past the ends, which on
        a GPU would fail in the kernel and leave CUDA unusable.
        """
        if self._tensor is None:
            if set(map(type, self.numbers)) != {int}:
                raise NotWholeBatch("its indices are not plain ints")
            self._tensor = torch.tensor(self.numbers, dtype=torch.int64, device="cpu")
        if self._below is not None and self._below <= length:
            return self._tensor
        least = min(self.numbers)
        if not -length <= least <= max(self.numbers) < length:
            raise IndexError(f"index out of range of {length} samples")
        return self._tensor if least >= 0 else torch.where(self._tensor < 0, self._tensor + length, self._tensor)

    def rows_of(self, stored: Tensor) -> Tensor:
        """Copies of these rows of `stored`, as stacking them gives."""
        usual = _USUAL.get(id(stored))
        if usual is None or usual() is not stored:
            _check_kind(stored)
        if stored.requires_grad:
            raise NotWholeBatch(UNUSUAL)
        indices = self.within(len(stored))
        return stored.index_select(0, indices if stored.is_cpu else indices.to(stored.device))


UNUSUAL = "it keeps tensors of an unusual kind"
_USUAL: dict[int, weakref.ref[Tensor]] = {}
"""By identity, the tensors found to be of the usual kind, which does not change: checking each time would cost as much
as taking the rows."""


def _check_kind(stored: Tensor) -> None:
    odd = stored.is_quantized or stored.is_conj() or stored.is_neg() or stored.is_nested
    if type(stored) is not Tensor or odd or stored.layout is not torch.strided or not stored.dim():
        raise NotWholeBatch(UNUSUAL)
    key = id(stored)
    _USUAL[key] = weakref.ref(stored, lambda _: _USUAL.pop(key, None))


class LoaderOrder:
    """Takes the place of `iter(batch_sampler)`."""

    def __init__(self, batch_sampler: samplers.BatchSampler) -> None:
        self._batches = self._drawn(batch_sampler)
        self._last: tuple[list[int], Tensor, int] | None = None

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        return next(self._batches)

    def indices(self, wanted: Sequence[int]) -> Indices:
        """With the tensor, if `wanted` is the last list that was handed out."""
        last = self._last
        return Indices(*last) if last is not None and last[0] == wanted else Indices(wanted)

    def _drawn(self, batch_sampler: samplers.BatchSampler) -> Iterator[list[int]]:
        """As torch's BatchSampler does: it reads the same of its attributes, at the same moments."""
        drop_last, size = batch_sampler.drop_last, batch_sampler.batch_size
        pieces = _pieces(batch_sampler.sampler)
        piece, numbers, at = _Piece(torch.empty(0, dtype=torch.int64), 0), list[int](), 0
        while True:
            batch = numbers[at : at + size]
            self._last = (batch[:], piece.order[at : at + size], piece.below)
            at += size
            while len(batch) < size and (drawn := next(pieces, None)) is not None:
                if numbers_of := drawn.order.tolist():
                    piece, numbers, at = drawn, numbers_of, size - len(batch)
                    self._last = None if batch else (numbers[:at], piece.order[:at], piece.below)
                    batch += numbers[:at]
            if not batch or (drop_last and len(batch) < size):
                return
            yield batch
            if not drop_last:
                size = batch_sampler.batch_size


class _Piece(NamedTuple):
    order: Tensor
    """Int64 [samples], or fewer."""
    below: int


def loader_order(iterator: _BaseDataLoaderIter) -> LoaderOrder | None:
    """For torch's iterator of a DataLoader before its first batch; None where the order is not torch's own: another
    sampler, one with replacement, or classes that a script has changed."""
    batches: object = order_of(iterator)
    batch_sampler: object = batch_sampler_of(iterator)
    if type(batches) is not GeneratorType or inspect.getgeneratorstate(batches) != inspect.GEN_CREATED:
        return None
    if type(batch_sampler) is not samplers.BatchSampler or not _is_torchs(samplers.BatchSampler, batches.gi_code):
        return None
    frame = batches.gi_frame
    if frame is None or frame.f_locals["self"] is not batch_sampler:
        return None
    sampler = batch_sampler.sampler
    if type(sampler) not in (samplers.RandomSampler, samplers.SequentialSampler) or not _is_torchs(type(sampler)):
        return None
    if getattr(sampler, "replacement", False) or type(batch_sampler.batch_size) is not int:
        return None
    return LoaderOrder(batch_sampler)


def _is_torchs(kind: type, code: CodeType | None = None) -> bool:
    function = vars(kind)["__iter__"]
    known = isinstance(function, FunctionType) and function.__globals__ is vars(samplers)
    return known and (code is None or function.__code__ is code)


def _pieces(sampler: Iterable[int]) -> Iterator[_Piece]:
    """Permutations, one after the other. As in torch, the last one is drawn even if nothing of it is used."""
    if isinstance(sampler, samplers.SequentialSampler):
        yield _Piece(torch.arange(len(sampler.data_source), device="cpu"), len(sampler.data_source))
        return
    assert isinstance(sampler, samplers.RandomSampler)
    samples = len(sampler.data_source)
    generator = sampler.generator
    if generator is None:
        generator = torch.Generator()
        generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    for _ in range(sampler.num_samples // samples):
        yield _Piece(torch.randperm(samples, generator=generator).cpu(), samples)
    yield _Piece(torch.randperm(samples, generator=generator)[: sampler.num_samples % samples].cpu(), samples)
