"""Where a run stands in its epoch, from torch's own loaders, without calling the script's own code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, WeightedRandomSampler

from flatout.script.epochs import (
    BATCHES_UNCLEAR,
    LENGTH_UNKNOWN,
    NO_BATCH_SIZE,
    NO_LOADER,
    SEVERAL_BATCHES,
    SEVERAL_LOADERS,
    TOO_EARLY,
    Epoch,
    EpochStarts,
    Progress,
    known_length,
    progress,
)
from flatout.script.watch import Watch

DATA = TensorDataset(torch.zeros(50, 2))


class Own(Dataset[Any]):
    """A data set of a script, whose length is its own code."""

    def __len__(self) -> int:
        raise AssertionError("the script's code was called")

    def __getitem__(self, place: int) -> Any:
        return torch.zeros(2)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([torch.zeros(2)] * 12)


class OwnLoader(DataLoader[Any]):
    def __len__(self) -> int:
        raise AssertionError("the script's code was called")


@pytest.mark.parametrize(
    ("loader", "batches"),
    [
        (DataLoader(DATA, batch_size=4), 13),
        (DataLoader(DATA, batch_size=4, drop_last=True), 12),
        (DataLoader(DATA, batch_size=4, shuffle=True), 13),
        (DataLoader([1, 2, 3], batch_size=2), 2),  # type: ignore[arg-type]
        (DataLoader(Subset(Own(), range(10)), batch_size=5), 2),
        (DataLoader(Own(), sampler=WeightedRandomSampler([1.0] * 6, 6), batch_size=2), 3),
        (DataLoader(Own(), batch_size=2), None),
        (DataLoader(DATA, batch_size=None), None),
        (DataLoader(DATA, batch_sampler=[[1, 2], [3]]), None),
        (DataLoader(Stream(), batch_size=2), None),
        (OwnLoader(DATA, batch_size=4), None),
    ],
)
def test_lengths_that_are_known_without_the_scripts_code(loader: DataLoader[Any], batches: int | None) -> None:
    assert known_length(loader) == batches


def after(loader: DataLoader[Any], *, fetched: int, steps: int, epochs: EpochStarts | None = None) -> Progress:
    """After so many batches and steps of a training loop, 20 s after it began."""
    watch = Watch()
    watch.enabled = True
    watch.subject.loaders.add(loader)
    iterator = iter(loader)
    for _ in range(fetched):
        next(iterator)
    watch.batches_yielded = lambda one: fetched  # type: ignore[method-assign]
    return progress(watch, epochs or EpochStarts(), steps=steps, first_step_at=100.0, now=120.0)


def test_an_epoch_whose_length_torch_knows() -> None:
    found = after(DataLoader(DATA, batch_size=4), fetched=10, steps=10)
    assert found.epoch == Epoch(number=1, steps_done=10, steps_total=13, seconds=20.0)
    assert found.epoch.seconds_left == pytest.approx(6.0)
    assert found.samples_per_step == 4


def test_a_prefetcher_is_a_batch_ahead() -> None:
    found = after(DataLoader(DATA, batch_size=4), fetched=11, steps=10)
    assert (found.epoch and found.epoch.steps_total, found.samples_per_step) == (13, 4)


def test_accumulated_steps_take_several_batches() -> None:
    found = after(DataLoader(DATA, batch_size=2), fetched=21, steps=10)
    assert found.samples_per_step == 4
    assert found.epoch is not None
    assert (found.epoch.steps_total, found.epoch.seconds_left) == (None, None)
    assert found.epoch.total_unknown_because == SEVERAL_BATCHES


def test_the_epoch_before_shows_the_length_where_only_the_script_knows_it() -> None:
    epochs = EpochStarts()
    loader = DataLoader(DATA, batch_size=None)
    first = after(loader, fetched=10, steps=10, epochs=epochs)
    assert first.epoch == Epoch(
        number=1, steps_done=10, steps_total=None, total_unknown_because=LENGTH_UNKNOWN, seconds=20.0
    )
    assert (first.samples_per_step, first.samples_unknown_because) == (None, NO_BATCH_SIZE)
    epochs.iterator_made(loader, began=110.0, steps=40)
    epochs.step_ended(110.5, None)
    second = after(loader, fetched=20, steps=60, epochs=epochs)
    assert second.epoch == Epoch(number=2, steps_done=20, steps_total=40, seconds=10.0)
    assert second.epoch.seconds_left == 10.0


@pytest.mark.parametrize(("steps", "samples"), [(3, 4), (6, 2), (4, None)])
def test_of_short_epochs_the_one_before_shows_what_a_step_takes(steps: int, samples: int | None) -> None:
    """Samples a second were unknown for ever where an epoch has fewer than five steps."""
    epochs, loader = EpochStarts(), DataLoader(TensorDataset(torch.zeros(12, 1)), batch_size=2)
    epochs.iterator_made(loader, began=110.0, steps=steps)
    epochs.step_ended(110.5, None)
    found = after(loader, fetched=1, steps=steps + 1, epochs=epochs)
    assert found.samples_per_step == samples


def test_an_evaluation_on_the_training_set_is_no_epoch() -> None:
    epochs, loader = EpochStarts(), DataLoader(DATA)
    epochs.iterator_made(loader, began=110.0, steps=40)  # evaluation
    epochs.iterator_made(loader, began=111.0, steps=40)
    epochs.step_ended(111.5, None)
    assert (epochs.begun, epochs.steps_in_last, epochs.began_at) == (1, 40, (111.0, 40))


@pytest.mark.parametrize(
    ("fetched", "steps", "why"), [(3, 3, TOO_EARLY), (19, 10, BATCHES_UNCLEAR), (4, 10, BATCHES_UNCLEAR)]
)
def test_batches_that_do_not_match_steps(fetched: int, steps: int, why: str) -> None:
    found = after(DataLoader(DATA, batch_size=2), fetched=fetched, steps=steps)
    assert (found.samples_per_step, found.samples_unknown_because) == (None, why)
    assert found.epoch is not None
    assert (found.epoch.steps_total, found.epoch.total_unknown_because) == (None, why)


@pytest.mark.parametrize(("loaders", "why"), [((), NO_LOADER), ((DataLoader(DATA), DataLoader(DATA)), SEVERAL_LOADERS)])
def test_epochs_need_one_loader(loaders: tuple[DataLoader[Any], ...], why: str) -> None:
    watch = Watch()
    for loader in loaders:
        watch.subject.loaders.add(loader)
    found = progress(watch, EpochStarts(), steps=10, first_step_at=1.0, now=2.0)
    assert (found.epoch, found.epoch_unknown_because, found.samples_per_step) == (None, why, None)


def test_no_time_is_left_over_where_an_epoch_goes_beyond_the_one_before() -> None:
    assert Epoch(number=2, steps_done=41, steps_total=40, seconds=10.0).seconds_left is None
    assert Epoch(number=2, steps_done=0, steps_total=40, seconds=10.0).seconds_left is None
    assert Epoch(number=2, steps_done=4, steps_total=40, seconds=10.0).seconds_left is None  # too few to tell


def test_a_watched_loop_counts_its_batches() -> None:
    watch, loader = Watch(), DataLoader(DATA, batch_size=4)
    watch.install(torch)
    try:
        iterator = iter(loader)
        next(iterator), next(iterator)
        assert watch.batches_yielded(loader) == 2
        del iterator
        assert watch.batches_yielded(loader) is None
    finally:
        watch.uninstall()
