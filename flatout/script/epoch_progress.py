"""Where a run stands in its epoch: steps done, and of how many where that can be known without the script's own code.

How many batches an epoch has is known from torch's own samplers and data sets, or from the epoch before. A data set's
`__len__` that the script defines is never called: it may count, print, or read a file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flatout.script.epochs import EpochStarts
from flatout.tracebacks import is_users_file

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from flatout.script.watch import Watch

LEAST_STEPS = 5
"""From here on it shows how many batches make a step."""
MOST_AHEAD = 2
"""Batches that a prefetcher may have taken before their step."""

NO_LOADER = "no DataLoader feeds training"
SEVERAL_LOADERS = "several DataLoaders feed training"
LENGTH_UNKNOWN = "the first epoch shows it: the length of this data set is the script's own code"
SEVERAL_BATCHES = "the first epoch shows it: a step takes several batches"
BATCHES_UNCLEAR = "batches and steps do not correspond"
TOO_EARLY = "too few steps yet"
NO_BATCH_SIZE = "the loader has no fixed batch size"


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """The epoch in progress: one pass over the loader that feeds training."""

    number: int
    """From 1 on."""
    steps_done: int
    steps_total: int | None
    total_unknown_because: str = ""
    seconds: float
    """Since it began."""

    @property
    def seconds_left(self) -> float | None:
        """At the epoch's own pace, pauses included; None where its length is not known, or it has hardly begun, or has
        gone beyond."""
        if self.steps_total is None or self.steps_done < LEAST_STEPS or self.steps_done > self.steps_total:
            return None
        return (self.steps_total - self.steps_done) * self.seconds / self.steps_done


@dataclass(frozen=True, kw_only=True)
class Progress:
    """None: not known, and why."""

    epoch: Epoch | None
    epoch_unknown_because: str = ""
    samples_per_step: int | None
    """Full batches of a step, times their size."""
    samples_unknown_because: str = ""


def progress(watch: Watch, epochs: EpochStarts, *, steps: int, first_step_at: float | None, now: float) -> Progress:
    """steps: in the run so far. first_step_at, now: on the clock of time.perf_counter()."""
    loaders = list(watch.subject.loaders)
    if len(loaders) != 1 or first_step_at is None:
        why = SEVERAL_LOADERS if len(loaders) > 1 else NO_LOADER
        return Progress(epoch=None, epoch_unknown_because=why, samples_per_step=None, samples_unknown_because=why)
    began, before = epochs.began_at if epochs.began_at is not None else (first_step_at, 0)
    done = steps - before
    batches, unclear = _batches_a_step(watch.batches_yielded(loaders[0]), done)
    if unclear == TOO_EARLY:  # as in an epoch of fewer steps than that, where the one before shows it
        batches = _batches_a_step_before(known_length(loaders[0]), epochs.steps_in_last)
    total, why = _steps_total(loaders[0], epochs, batches)
    size = loaders[0].batch_size
    return Progress(
        epoch=Epoch(
            number=epochs.begun + 1,
            steps_done=done,
            steps_total=total,
            total_unknown_because=why or unclear if total is None else "",
            seconds=max(0.0, now - began),
        ),
        samples_per_step=batches * size if batches is not None and size is not None else None,
        samples_unknown_because="" if batches is not None and size is not None else unclear or NO_BATCH_SIZE,
    )


def _batches_a_step(yielded: int | None, done: int) -> tuple[int | None, str]:
    """How many batches the steps of this epoch took each, where that is a whole number; or why it is not known."""
    if yielded is None:
        return None, BATCHES_UNCLEAR
    if done < LEAST_STEPS:
        return None, TOO_EARLY
    each = yielded // done
    return (each, "") if each and yielded - each * done <= MOST_AHEAD * each else (None, BATCHES_UNCLEAR)


def _batches_a_step_before(length: int | None, steps: int | None) -> int | None:
    """length: in batches, of the epoch before."""
    return length // steps if length and steps and length % steps == 0 else None


def _steps_total(loader: DataLoader[object], epochs: EpochStarts, batches: int | None) -> tuple[int | None, str]:
    length = known_length(loader)
    if batches == 1 and length is not None:
        return length, ""
    if epochs.steps_in_last is not None:
        return epochs.steps_in_last, ""
    if length is None:
        return None, LENGTH_UNKNOWN
    return None, SEVERAL_BATCHES if batches is not None else ""


def known_length(loader: DataLoader[object]) -> int | None:
    """Batches of an epoch; None where only the script's own code knows."""
    from torch.utils.data import (
        BatchSampler,
        DataLoader,
        DistributedSampler,
        IterableDataset,
        RandomSampler,
        Sampler,
        SequentialSampler,
        SubsetRandomSampler,
        WeightedRandomSampler,
    )

    from flatout.torch_private.dispatch import without_torch_function

    if type(loader) is not DataLoader or type(loader.batch_sampler) is not BatchSampler:
        return None
    sampler, data = loader.sampler, loader.dataset
    ours: tuple[type[Sampler[object]], ...] = (RandomSampler, SequentialSampler)
    counts: tuple[type[Sampler[object]], ...] = (SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
    if type(sampler) in ours:
        if getattr(sampler, "data_source", None) is not data or isinstance(data, IterableDataset) or _is_users(data):
            return None
    elif type(sampler) not in counts:
        return None
    try:
        with without_torch_function():  # TensorDataset asks a tensor, and the script's own modes must not see that
            return len(loader)
    except (TypeError, ValueError, NotImplementedError, AttributeError):
        return None


def _is_users(data: object) -> bool:
    """Is its `__len__` the script's code? Functions of C, such as a list's, have no file."""
    code = getattr(getattr(type(data), "__len__", None), "__code__", None)
    file = getattr(code, "co_filename", "")
    return is_users_file(file) or file.startswith("<")
