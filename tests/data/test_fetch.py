"""Whole batches are the loader's own, to the bit; where they cannot be, the loader goes on as it did."""

from __future__ import annotations

import itertools
import random
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from flatout.data.fetch import batched_fetch, same_bits, strategy

Pair = namedtuple("Pair", "image label")
COUNTER = itertools.count()
BOTH = {"batched", "cached"}


class Samples(Dataset):  # type: ignore[type-arg]
    """`count` samples, each made by `make(index)`."""

    def __init__(self, make: Callable[[int], Any], count: int = 11) -> None:
        self.make, self.count, self.calls = make, count, 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        self.calls += 1
        return self.make(int(index))


class Unhashable(Samples):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(6.0))


class Reversed(torch.utils.data.Sampler):  # type: ignore[type-arg]
    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def tensors(count: int = 11) -> TensorDataset:
    return TensorDataset(torch.randn(count, 3), torch.arange(count))


def keyed(index: int) -> dict[str, Any]:
    return {"x": torch.full((2,), float(index)), "name": f"n{index}", "weight": index / 3}


DATASETS: dict[str, Callable[[], Any]] = {
    "tensors": tensors,
    "subset of subset": lambda: Subset(Subset(tensors(20), list(range(0, 20, 2))), [3, 1, 7, 0, 0]),
    "subset by tensor": lambda: Subset(tensors(20), torch.tensor([3, 1, 7])),  # type: ignore[arg-type]
    "images seen as NCHW": lambda: TensorDataset(torch.randn(9, 4, 4, 3).permute(0, 3, 1, 2)),
    "dict": lambda: Samples(keyed),
    "tuple": lambda: Samples(lambda i: (torch.ones(2) * i, i, i / 7, f"s{i}", bool(i % 2))),
    "bytes alone": lambda: Samples(lambda i: f"s{i}"),
    "numpy": lambda: Samples(lambda i: (np.full((2, 2), i, dtype=np.float32), np.int64(i))),
    "named tuple": lambda: Samples(lambda i: Pair(torch.ones(2) * i, i)),
    "nested": lambda: Samples(lambda i: (torch.ones(1) * i, (i, {"a": float(i)}))),
    "unhashable": lambda: Unhashable(lambda i: (torch.ones(2) * i, i)),
    "nan": lambda: Samples(lambda i: torch.tensor([float("nan"), i])),
}


@pytest.mark.parametrize("name", DATASETS)
def test_batches_are_the_loaders_own(name: str) -> None:
    dataset = DATASETS[name]()
    assert strategy(dataset, default_collate).kind in BOTH

    def epochs() -> list[Any]:
        torch.manual_seed(3)
        loader = DataLoader(dataset, batch_size=4, shuffle=True)
        found = [batch for _ in range(2) for batch in loader]
        return [*found, torch.rand(2)]  # and where the generator stands afterwards

    plain = epochs()
    told: list[str] = []
    with batched_fetch(BOTH, on_mismatch=told.append):
        assert same_bits(epochs(), plain)
    assert told == []


def test_kept_samples_are_not_computed_again() -> None:
    dataset = Samples(lambda i: (torch.ones(2) * i, i), count=40)
    with batched_fetch(BOTH):
        loader = DataLoader(dataset, batch_size=20)
        list(loader)
        dataset.calls = 0
        list(loader)
    assert dataset.calls == 2  # one of each batch, to compare


@pytest.mark.parametrize("batches", [[[0, 3], [5]], [torch.tensor([1, 2])], [(4, -1)], [np.array([1, 9])]])
def test_any_batch_sampler(batches: Any) -> None:
    dataset = tensors()
    loader = DataLoader(dataset, batch_sampler=Reversed(batches))
    plain = list(loader)
    with batched_fetch(BOTH):
        assert same_bits(list(loader), plain)


def test_indices_that_are_no_numbers_are_left_to_the_dataset() -> None:
    dataset = Samples(lambda i: torch.ones(2) * i)
    dataset.__class__ = type("Keyed", (Samples,), {"__getitem__": lambda self, key: torch.ones(1) * len(str(key))})
    loader = DataLoader(dataset, batch_sampler=Reversed([["a", "bb"]]))
    with batched_fetch(BOTH):
        assert next(iter(loader)).tolist() == [[1.0], [2.0]]


def test_out_of_range_stays_the_users_own_error() -> None:
    with batched_fetch(BOTH), pytest.raises(IndexError):
        list(DataLoader(tensors(), batch_sampler=Reversed([[0], [99]])))


@pytest.mark.parametrize(
    ("dataset", "collate", "why"),
    [
        (Samples(lambda i: torch.rand(2)), default_collate, "random"),
        (Samples(lambda i: random.random()), default_collate, "random"),
        (Samples(lambda i: np.random.rand()), default_collate, "random"),
        (Samples(lambda i: next(COUNTER)), default_collate, "differ"),
        (Samples(lambda i: torch.ones(i + 1)), default_collate, "put together"),
        (Samples(lambda i: None), default_collate, "put together"),
        (Samples(lambda i: torch.ones(1), count=0), default_collate, "how long"),
        (tensors(), lambda samples: samples, "collate"),
        (Stream(), default_collate, "stream"),
        ([1, 2, 3], default_collate, "stream"),
    ],
)
def test_refused_and_no_generator_moved(dataset: Any, collate: Any, why: str) -> None:
    torch_state, python_state, numpy_state = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    found = strategy(dataset, collate)
    assert found.kind == ""
    assert why in found.obstacle
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state
    assert (np.random.get_state()[1] == numpy_state).all()
    with batched_fetch(BOTH):
        if not isinstance(dataset, Samples):
            list(DataLoader(dataset, batch_size=2, collate_fn=collate))


def test_what_does_not_fit_in_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flatout.data.fetch.available_memory_bytes", lambda: 100)
    found = strategy(Samples(lambda i: torch.ones(64)), default_collate)
    assert found.kind == ""
    assert "GiB" in found.obstacle


def test_random_numbers_in_few_samples_are_found_and_the_stream_goes_on() -> None:
    def make(index: int) -> torch.Tensor:
        return torch.rand(1) if index == 5 else torch.ones(1) * index

    def epoch() -> list[Any]:
        torch.manual_seed(1)
        return [*DataLoader(Samples(make, count=40), batch_size=8), torch.rand(1)]

    plain = epoch()
    with batched_fetch(BOTH):
        assert same_bits(epoch(), plain)


def test_a_data_set_that_changes_under_way_is_noticed() -> None:
    dataset = Samples(lambda i: torch.ones(1) * i, count=8)
    told: list[str] = []
    with batched_fetch(BOTH, on_mismatch=told.append):
        loader = DataLoader(dataset, batch_size=4)
        list(loader)
        dataset.make = lambda i: torch.ones(1) * -i - 1
        assert torch.cat(list(loader)).flatten().tolist() == [-1.0 - i for i in range(8)]
    assert len(told) == 1


def test_new_tensors_in_a_tensor_data_set_are_seen() -> None:
    dataset = tensors(4)
    loader = DataLoader(dataset, batch_size=4)
    with batched_fetch(BOTH):
        list(loader)
        dataset.tensors = (torch.zeros(4, 3), torch.zeros(4))
        assert next(iter(loader))[0].sum() == 0
        dataset.tensors[0].fill_(2.0)
        assert next(iter(loader))[0].sum() == 24


def test_another_loader_of_the_same_data_keeps_its_collate_function() -> None:
    dataset = tensors(4)
    with batched_fetch(BOTH):
        list(DataLoader(dataset, batch_size=2))
        assert next(iter(DataLoader(dataset, batch_size=2, collate_fn=len))) == 2


def test_only_the_kinds_that_were_asked_for() -> None:
    dataset = Samples(lambda i: torch.ones(1) * i, count=8)
    with batched_fetch({"batched"}):
        list(DataLoader(dataset, batch_size=4))
        dataset.calls = 0
        list(DataLoader(dataset, batch_size=4))
    assert dataset.calls == 8


def test_undone() -> None:
    before = _MapDatasetFetcher.fetch
    with batched_fetch(BOTH):
        assert _MapDatasetFetcher.fetch is not before
    assert _MapDatasetFetcher.fetch is before
