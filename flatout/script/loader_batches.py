"""The batch size of a script's DataLoader, changed between two steps: the levers of trials that measure a curve.

torch's BatchSampler may fix its size when an epoch begins. `LiveBatches`, which is on from the start of such a trial,
has it ask for each batch anew, and counts what is drawn; `BatchSize` sets the size. Both are for trials alone.
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
from flatout.replaced import replaced

if TYPE_CHECKING:
    from torch.utils.data import BatchSampler, DataLoader


class LiveBatches(Lever):
    """torch's batch sampler, batch for batch the same, but asking for its size each time."""

    name = "live batches"
    plan_field = "live_batches"
    switch = "start"

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
    """Of the loader that feeds training; those that feed evaluation keep theirs."""

    name = "batch size"
    plan_field = "batch_size"

    def apply(self, subject: Subject, value: int) -> AbstractContextManager[None]:
        def visit(loader: DataLoader[object]) -> Undo[DataLoader[object]]:
            sampler = _own_sampler(loader)
            before, sampler.batch_size = sampler.batch_size, value
            return lambda loader: setattr(loader.batch_sampler, "batch_size", before)

        return subject.loaders.each(visit)


LEVERS = (LiveBatches(), BatchSize())


def _count(subject: Subject, sampler: BatchSampler, batch: list[int]) -> None:
    if any(loader.batch_sampler is sampler for loader in subject.loaders):
        subject.samples_drawn = (subject.samples_drawn or 0) + len(batch)


def _own_sampler(loader: DataLoader[object]) -> BatchSampler:
    """torch's own; what another does with its size is not known."""
    from torch.utils.data import BatchSampler

    sampler = loader.batch_sampler
    if type(sampler) is not BatchSampler:
        kind = "no batches of its own" if sampler is None else f"a {type(sampler).__name__} for its batches"
        raise UsageError(f"the loader has {kind}", limit="only torch's BatchSampler takes another size")
    return sampler
