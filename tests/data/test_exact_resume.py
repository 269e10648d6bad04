"""A resumed run gets the same samples, or it is said that it does not: rare draws, changed batches, own generators."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset

from flatout.data.batches import batches, whole_epoch
from flatout.data.given_batches import GivenBatches
from flatout.data.order import epoch_order
from flatout.errors import UsageError
from flatout.plan import Plan

SAMPLES = 64
RARE = int(epoch_order(SAMPLES, seed=0, epoch=0, shuffle=True)[5])
"""Comes up in the second batch of four, and in later epochs not in the first."""


class Rarely(Dataset[Any]):
    """Only one sample draws random numbers."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> float:
        return index + (float(torch.rand(())) if index == RARE else 0.0)


def test_rare_draws_are_the_same_in_a_resumed_run() -> None:
    """The sample came up before the run stopped: the resumed one meets it in later epochs for the first time."""

    def rest(source: Any) -> list[Any]:
        found = []
        while source.epoch < 3:
            found += [(batch.tolist(), float(torch.rand(()))) for batch in source]  # with draws of the training
        return found

    torch.manual_seed(0)
    whole: Any = batches(Rarely(), 4, Plan(loader_workers=0))
    for _, _batch in zip(range(3), whole, strict=False):
        pass
    state, generator = whole.state_dict(), torch.get_rng_state()
    expected = rest(whole)
    resumed: Any = batches(Rarely(), 4, Plan(loader_workers=0))
    resumed.load_state_dict(state)
    torch.set_rng_state(generator)
    assert rest(resumed) == expected


def test_rare_draws_do_not_depend_on_workers() -> None:
    """Each of them has only a part of the batches."""

    def drawn(**choices: Any) -> list[float]:
        source = batches(Rarely(), 4, Plan(**choices))
        return [float(one) for _ in range(3) for batch in source for one in batch if one % 1]

    assert drawn(loader_workers=2, persistent_workers=True) == drawn(loader_workers=0)


class Together(Dataset[Any]):
    """Has samples only by whole batches, as torch's loader accepts."""

    def __len__(self) -> int:
        return 8

    def __getitems__(self, many: list[int]) -> list[Any]:
        return [i + torch.rand(()) for i in many]


def test_samples_that_come_by_whole_batches_may_draw() -> None:
    found = [torch.cat([*batches(Together(), size, shuffle=False, seed=2)]) for size in (3, 8)]
    assert torch.equal(*found)
    assert found[0].long().tolist() == list(range(8))
    assert len({float(one) % 1 for one in found[0]}) == 8


def columns(samples: list[int]) -> tuple[Any, list[str]]:
    return np.array(samples), [f"sample {i}" for i in samples]


def test_workers_leave_a_batch_as_the_collate_function_made_it() -> None:
    data: Any = [*range(8)]
    for workers in (0, 1):
        batch = next(iter(batches(data, 4, Plan(loader_workers=workers), shuffle=False, collate_fn=columns)))
        assert (type(batch), type(batch[0]), batch[1]) == (tuple, np.ndarray, [f"sample {i}" for i in range(4)])


class WithGenerator(Dataset[Any]):
    def __init__(self, generator: object) -> None:
        self.source = generator

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index


OWN = [np.random.default_rng(0), np.random.RandomState(0), torch.Generator(), random.Random(0)]
GLOBAL = [torch.default_generator, random.random.__self__, np.random.get_state.__self__]  # type: ignore[attr-defined]


@pytest.mark.parametrize("generator", OWN)
def test_a_generator_of_the_data_sets_own_is_named_where_a_run_may_resume(generator: object) -> None:
    said = "WithGenerator.source: the state of the data set's own random generator is not saved"
    source: Any = batches(Subset(WithGenerator(generator), range(8)), 4)
    source.state_dict()  # nothing was drawn yet
    next(iter(source))
    with pytest.warns(UserWarning, match=said):
        state = source.state_dict()
    source.state_dict()  # once
    resumed: Any = batches(WithGenerator(generator), 4)
    with pytest.warns(UserWarning, match=said):
        resumed.load_state_dict(state)


@pytest.mark.parametrize("generator", GLOBAL)
def test_the_global_generators_are_nobodys_own(generator: object) -> None:
    source: Any = batches(WithGenerator(generator), 4)
    next(iter(source))
    assert source.state_dict()["position"] == 4


class Made:
    """Batches of the user's own, the same each time; numpy's arrays as they are."""

    def __init__(self, last: float = 3.0) -> None:
        self.last = last

    def __iter__(self) -> Iterator[Any]:
        for value in (0.0, 1.0, 2.0, self.last):
            yield {"x": torch.full((2,), value), "ids": np.full(2, value), "labels": [torch.full((2,), value)]}


def state_after(change: Any) -> Any:
    """Of a run that stopped after four batches, each of them changed by its step."""
    source = GivenBatches(Made(), torch.device("cpu"))
    for batch in source:
        change(batch)
        if source.position == 4:
            break
    return source.state_dict()


def pop(batch: Any) -> None:
    del batch["labels"][0], batch["labels"]
    batch["ids"] += 1


def in_place(batch: Any) -> None:
    batch["x"][0] -= 1


def test_a_batch_that_its_step_changed_comes_again() -> None:
    for change, is_compared in ((lambda batch: None, True), (pop, True), (in_place, False)):
        state = state_after(change)
        assert ("checksum" in state) == is_compared
        resumed = GivenBatches(Made(), torch.device("cpu"))
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        assert [*resumed] == []  # the epoch's end
        other = GivenBatches(Made(last=4.0), torch.device("cpu"))
        other.load_state_dict(state)
        if is_compared:
            with pytest.raises(UsageError, match="yielded another batch 4 than before"):
                next(iter(other), None)
        else:
            assert next(iter(other), None) is None


def test_batches_made_in_inference_mode_are_compared_too() -> None:
    with torch.inference_mode():
        made = [torch.arange(3.0), torch.ones(3)]
    source = GivenBatches(made, torch.device("cpu"))
    next(iter(source))
    assert "checksum" in source.state_dict()


class Numbers(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


def test_a_whole_epoch_in_between_leaves_the_state_of_a_stream() -> None:
    source: Any = batches(Numbers(), 4)
    next(iter(source))
    state = source.state_dict()
    assert "checksum" in state
    with whole_epoch(source):
        assert sum(map(len, source)) == 10
    assert source.state_dict() == state


def test_whole_numbers_of_any_kind_are_taken() -> None:
    for seed in (np.int64(3), 3):
        source: Any = batches(torch.arange(8), np.int64(4), seed=seed)  # type: ignore[arg-type]
        next(iter(source))
        assert {type(one) for one in source.state_dict().values()} == {int}
    lengths: Any = [3, 1, 2, 2]
    tokens: Any = np.int64(6)
    source = batches([*range(4)], np.int64(2), tokens=tokens, length=lengths)  # type: ignore[arg-type]
    assert {type(one) for one in source.state_dict()["buckets"].values()} == {int}
