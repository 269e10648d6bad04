"""Epochs of a run: what their starts cost, and where the run stands in the one in progress.

An epoch's start has a cost: starting workers, sending them the data set, waiting for the first batch. Medians of steps
do not show it, because it affects one step per epoch.

How many batches an epoch has is known from torch's own samplers and data sets, or from the epoch before. A data set's
`__len__` that the script defines is never called: it may count, print, or read a file.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flatout.tracebacks import is_users_file

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from flatout.script.watch import Watch

MOST_KEPT = 512
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


class EpochStarts:
    """Called by a run: `iterator_made` when the training loader makes one, `step_ended` at the boundary after it."""

    def __init__(self) -> None:
        self.workers = 0
        """Processes of the training loader that are restarted in every epoch."""
        self._previous: tuple[float, int] | None = None
        self._is_new = False
        """Has no step ended since then?"""
        self._costs: deque[float] = deque(maxlen=MOST_KEPT)
        self._lengths: deque[float] = deque(maxlen=MOST_KEPT)
        self._steps: deque[int] = deque(maxlen=MOST_KEPT)
        self._typical_seconds = 0.0
        self.begun = 0
        """Iterators of training loaders in which a step was seen; the first one is made before its loader is known."""
        self.began_at: tuple[float, int] | None = None
        """Clock, and steps in the run until then, of the latest of them."""
        self.steps_in_last: int | None = None
        """Steps of the one before."""

    def iterator_made(self, loader: DataLoader[object], began: float, steps: int = 0) -> None:
        """began: clock before the loader was asked for it, in seconds; steps: in the run until then."""
        self.workers = 0 if loader.persistent_workers else loader.num_workers
        if self._previous is not None:
            self._lengths.append(began - self._previous[0])
            self._steps.append(steps - self._previous[1])
        self._previous, self._is_new = (began, steps), True

    def step_ended(self, now: float, typical_seconds: float | None) -> None:
        """An iterator in which nothing was trained (an evaluation on the training set) is no epoch."""
        if not self._is_new or self._previous is None:
            return
        self.steps_in_last = self._previous[1] - (self.began_at[1] if self.began_at is not None else 0)
        self.begun, self.began_at, self._is_new = self.begun + 1, self._previous, False
        if typical_seconds is not None:
            self._typical_seconds = typical_seconds
            self._costs.append(max(0.0, now - self._previous[0] - typical_seconds))

    @property
    def cost_seconds(self) -> float | None:
        """Median, from asking for the iterator to the end of its first step, less a step's usual time.

        At most the part of the epoch not spent in steps: other work before the first step does not count.
        """
        if not self._costs or self.epoch_seconds is None:
            return statistics.median(self._costs) if self._costs else None
        left = self.epoch_seconds - statistics.median(self._steps) * self._typical_seconds
        return max(0.0, min(statistics.median(self._costs), left))

    @property
    def epoch_seconds(self) -> float | None:
        """Median, from one iterator to the next; None before the second."""
        return statistics.median(self._lengths) if self._lengths else None


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
