"""A LoaderOrder hands out what torch's samplers do, and draws at the same moments from the same generators."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from flatout.data.fetch import batched_fetch, same_bits
from flatout.data.indices import Indices, LoaderOrder, NotWholeBatch, loader_order


def drawn(batches: Iterator[list[int]], generator: torch.Generator | None) -> list[Any]:
    """Each batch with the states of the generators after it."""

    def states() -> tuple[bytes, ...]:
        kept = [torch.get_rng_state(), *([generator.get_state()] if generator is not None else [])]
        return tuple(state.numpy().tobytes() for state in kept)

    found: list[Any] = [states()]
    for batch in itertools.chain(batches, [None]):
        found.append((batch, states()))
    return found


@settings(max_examples=150, deadline=None)
@given(
    samples=st.integers(1, 13),
    size=st.integers(1, 15),
    wanted=st.none() | st.integers(1, 40),
    kind=st.sampled_from(["sequential", "seeded", "global"]),
    drop_last=st.booleans(),
)
def test_batches_and_generators_are_those_of_torch(
    samples: int, size: int, wanted: int | None, kind: str, drop_last: bool
) -> None:
    def run(ours: bool) -> tuple[list[Any], LoaderOrder | None]:
        torch.manual_seed(5)
        generator = torch.Generator().manual_seed(7) if kind == "seeded" else None
        data = range(samples)
        shuffled = RandomSampler(data, num_samples=wanted, generator=generator)
        batches = BatchSampler(SequentialSampler(data) if kind == "sequential" else shuffled, size, drop_last)
        order = LoaderOrder(batches) if ours else None
        return drawn(order or iter(batches), generator), order

    assert run(True)[0] == run(False)[0]


@pytest.mark.parametrize("size", [3, 4, 5, 12, 30])
def test_its_tensor_is_the_list(size: int) -> None:
    order = LoaderOrder(BatchSampler(RandomSampler(range(12), num_samples=30), size, False))
    for numbers in order:
        assert order.indices(numbers).within(12).tolist() == numbers
        assert order.indices([*numbers[1:], 0]).within(12).tolist() == [*numbers[1:], 0]
        with pytest.raises(IndexError):  # the data has become shorter meanwhile
            order.indices(numbers).within(max(numbers))


def test_what_is_no_plain_number_is_no_index() -> None:
    with pytest.raises(NotWholeBatch):
        Indices([True, 0]).within(4)
    assert Indices([-1, 0]).within(4).tolist() == [3, 0]


class Halving(RandomSampler):
    def __iter__(self) -> Iterator[int]:
        return iter([*super().__iter__()][::2])


DATA = TensorDataset(torch.arange(11.0), torch.arange(11))


@pytest.mark.parametrize(
    ("loader", "known"),
    [
        (DataLoader(DATA, 4, shuffle=True), True),
        (DataLoader(DATA, 4, drop_last=True), True),
        (DataLoader(DATA, 4, sampler=RandomSampler(DATA, replacement=True)), False),
        (DataLoader(DATA, 4, sampler=Halving(DATA)), False),
        (DataLoader(DATA, 4, sampler=[3, 1, 2]), False),
        (DataLoader(DATA, batch_size=None, shuffle=True), False),
        (DataLoader(DATA, batch_sampler=[[1, 2], [3]]), False),
    ],
)
def test_only_torchs_own_orders_are_known(loader: DataLoader[Any], known: bool) -> None:
    assert (loader_order(iter(loader)) is not None) is known
    begun = iter(loader)
    next(begun)
    assert loader_order(begun) is None

    def epochs() -> list[Any]:
        torch.manual_seed(1)
        return [*loader, *loader, torch.rand(1)]

    plain = epochs()
    with batched_fetch():
        assert same_bits(epochs(), plain)


def test_a_changed_sampler_class_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RandomSampler, "__iter__", lambda sampler: iter([5, 4]))
    with batched_fetch():
        assert [rows.tolist() for _, rows in DataLoader(DATA, 4, shuffle=True)] == [[5, 4]]


def test_a_batch_size_that_changes_within_an_epoch() -> None:
    def sizes() -> list[int]:
        torch.manual_seed(1)
        loader, found = DataLoader(DATA, 2, shuffle=True), []
        for _, rows in loader:
            found += [len(rows), *rows.tolist()]
            loader.batch_sampler.batch_size = 3  # type: ignore[union-attr]
        return found

    plain = sizes()
    with batched_fetch():
        assert sizes() == plain


def test_turned_on_and_off_within_epochs_and_two_loaders_at_once() -> None:
    def run(*, switching: bool) -> list[Any]:
        torch.manual_seed(1)
        one, other = DataLoader(DATA, 3, shuffle=True), DataLoader(DATA, 2, shuffle=True)
        found: list[Any] = []
        for _ in range(3):
            turns = zip(one, other, strict=False)
            while True:
                if switching:
                    with batched_fetch():
                        found += next(turns, [])
                if not (batch := next(turns, None)):
                    break
                found += batch
        return found

    assert same_bits(run(switching=True), run(switching=False))
    with batched_fetch():
        always = run(switching=False)
    assert same_bits(always, run(switching=False))


def test_a_profiler_sees_the_loader_as_ever() -> None:
    loader = DataLoader(DATA, 4, shuffle=True)
    with batched_fetch():
        list(loader)
        with torch.profiler.profile() as profile:
            assert len(list(loader)) == 3
    records = [one for one in profile.events() if "enumerate(DataLoader)" in one.name]
    assert len(records) == 4  # three batches, and the end


def test_what_a_script_puts_in_the_place_of_next_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    own, seen = _BaseDataLoaderIter.__next__, list[Any]()

    def __next__(iterator: Any) -> Any:
        batch = own(iterator)
        seen.append(batch)
        return batch

    loader = DataLoader(DATA, 4, shuffle=True)
    with batched_fetch():
        list(loader)
        monkeypatch.setattr(_BaseDataLoaderIter, "__next__", __next__)
        assert same_bits(list(loader), seen)
    assert len(seen) == 3


def test_data_that_begin_to_need_gradients_are_fetched_one_by_one() -> None:
    rows = torch.randn(8, 2)
    loader = DataLoader(TensorDataset(rows), 4)
    with batched_fetch():
        list(loader)
        rows.requires_grad_()
        assert all(batch.requires_grad for (batch,) in loader)
