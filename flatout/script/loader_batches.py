"""Change the batch size of a script's DataLoader between steps: levers of the trials that measure a batch-size curve.

torch's BatchSampler may read its size once per epoch. `LiveBatches`, on from the start of such a trial, reads it for
each batch and counts the samples drawn; `BatchSize` sets it. Both are for trials only.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from flatout.errors import UsageError
from flatout.levers.lever import Lever
from flatout.levers.subject import Subject, Undo
from flatout.plan_choices import ChoiceValue
from flatout.replaced import replaced

if TYPE_CHECKING:
    from torch.utils.data import BatchSampler, DataLoader


class LiveBatches(Lever):
    """torch's batch sampler with the same batches, but reading its size each time."""

    name = "live batches"
    plan_field = "live_batches"
    switch = "loader"

    @contextlib.contextmanager
    def apply(self, subject: Subject, value: object) -> Iterator[None]:
        from torch.utils.data import BatchSampler

        subject.samples_drawn = 0

        def batches(sampler: BatchSampler) -> Iterator[list[int]]:
            samples = iter(sampler.sampler)
            while batch := list(itertools.islice(samples, sampler.batch_size)):
                if sampler.drop_last and len(batch) < sampler.batch_size:
                    return
                _count(subject, sampler, batch)
                yield batch

        with replaced(BatchSampler, "__iter__", lambda original: batches):
            yield


class BatchSize(Lever):
    """Batch size of the loader that feeds training; loaders for evaluation keep theirs."""

    name = "batch size"
    plan_field = "batch_size"

    def apply(self, subject: Subject, value: ChoiceValue) -> AbstractContextManager[None]:
        def visit(loader: DataLoader[object]) -> Undo[DataLoader[object]]:
            sampler = _own_sampler(loader)
            before, sampler.batch_size = sampler.batch_size, int(value)
            return lambda loader: setattr(loader.batch_sampler, "batch_size", before)

        return subject.loaders.each(visit)


LEVERS = (LiveBatches(), BatchSize())


def _count(subject: Subject, sampler: BatchSampler, batch: list[int]) -> None:
    if any(loader.batch_sampler is sampler for loader in subject.loaders):
        subject.samples_drawn = (subject.samples_drawn or 0) + len(batch)


def _own_sampler(loader: DataLoader[object]) -> BatchSampler:
    """The loader's BatchSampler; UsageError for another class, whose use of its size is unknown."""
    from torch.utils.data import BatchSampler

    sampler = loader.batch_sampler
    if type(sampler) is not BatchSampler:
        kind = "no batch sampler" if sampler is None else f"a {type(sampler).__name__} for its batches"
        raise UsageError(f"the loader has {kind}", limit="only the size of torch's BatchSampler can be changed")
    return sampler
