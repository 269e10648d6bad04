"""The order of batches, which no number of workers, ranks or samples a batch may change; and any data as a source."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from flatout.data import workers as loading
from flatout.data.batches import batches, whole_epoch
from flatout.data.fetch import leaves
from flatout.data.sources import Whole
from flatout.data.workers import Pacing, start_method
from flatout.errors import UsageError
from flatout.plan import Plan
from tests.odd_defaults import odd_defaults

NUMBERS = torch.arange(103)


class Drawing(Dataset[Any]):
    """Samples with random draws from all three generators, as augmentation has them."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, float(torch.rand(())), random.random(), float(np.random.rand())


class Counting(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(50))


@dataclass
class Pairs:
    x: Any
    y: Any


def seen(source: Any, epochs: int = 1) -> list[list[int]]:
    return [batch.tolist() for _ in range(epochs) for batch in source]


@pytest.mark.filterwarnings("ignore:an epoch leaves out:UserWarning")
@settings(max_examples=40, deadline=None)
@given(
    length=st.integers(4, 60),
    sizes=st.lists(st.integers(1, 20), min_size=2, max_size=5),
    ranks=st.lists(st.integers(1, 4), min_size=2, max_size=5),
    seed=st.integers(0, 3),
)
def test_a_run_taken_up_with_other_sizes_and_ranks_sees_each_sample_once(
    length: int, sizes: list[int], ranks: list[int], seed: int
) -> None:
    """Stop after one batch, go on with another batch size and another number of ranks, and so on to the end."""
    whole = [i for batch in seen(batches(torch.arange(length), 7, seed=seed)) for i in batch]
    found: list[int] = []
    state: dict[str, Any] | None = None
    for turn in range(200):
        count = ranks[turn % len(ranks)]
        size = max(count, sizes[turn % len(sizes)])
        shares = []
        for rank in range(count):
            source = batches(torch.arange(length), size, seed=seed, rank=rank, ranks=count)
            if state is not None:
                source.load_state_dict(state)
            for batch in source:
                shares.append((batch.tolist(), source.state_dict()))
                break
        if not shares:
            break
        found += [i for share, _ in shares for i in share]
        state = shares[0][1]
        assert all(other == state for _, other in shares)
    dropped = length - len(found)
    assert found == whole[: len(found)]
    assert dropped < max(ranks)  # fewer samples than ranks at the very end


def test_epochs_differ_and_repeat_by_seed() -> None:
    first, again, other = (seen(batches(NUMBERS, 10, seed=seed), epochs=2) for seed in (1, 1, 2))
    assert first == again != other
    assert first[:11] != first[11:]
    assert sorted(i for batch in first[:11] for i in batch) == list(range(103))
    assert seen(batches(NUMBERS, 10, shuffle=False))[0] == list(range(10))


def test_the_state_counts_what_was_handed_out() -> None:
    source = batches(Drawing(), 5, Plan(loader_workers=1), seed=3)
    for i, _ in enumerate(source):
        assert source.state_dict()["position"] == min(24, 5 * (i + 1))
    assert (source.epoch, source.position) == (1, 0)


@pytest.mark.parametrize("workers", [0, 2])
def test_random_draws_in_samples_do_not_depend_on_workers_or_batch_size(workers: int) -> None:
    def drawn(size: int, workers: int) -> dict[int, list[float]]:
        source = batches(Drawing(), size, Plan(loader_workers=workers), seed=5)
        return {int(row[0]): [float(v) for v in row[1:]] for batch in source for row in zip(*batch, strict=True)}

    reference = drawn(24, 0)
    assert drawn(7, workers) == reference
    assert len({tuple(values) for values in reference.values()}) == 24


def test_the_trainings_random_numbers_are_left_alone() -> None:
    for workers in (0, 1):
        torch.manual_seed(0)
        expected = torch.rand(3)
        torch.manual_seed(0)
        for _ in batches(Drawing(), 8, Plan(loader_workers=workers)):
            pass
        assert torch.equal(torch.rand(3), expected)


def test_sources_of_every_kind(tmp_path: Path) -> None:
    x, y = torch.randn(40, 3), torch.arange(40)
    np.save(tmp_path / "x.npy", x.numpy())
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    kinds = [
        (x, y),
        {"x": x, "y": y},
        Pairs(x.numpy(), y.numpy()),
        (mapped, y),
        TensorDataset(x, y),
        Subset(TensorDataset(x, y), range(40)),
        [(x[i], y[i]) for i in range(40)],
    ]
    order = batches(y, 16, seed=1)
    for data, source in ((data, batches(data, 16, seed=1)) for data in kinds):
        order.load_state_dict({"seed": 1, "epoch": 0, "position": 0, "samples": 40})
        for batch, indices in zip(source, order, strict=True):
            if isinstance(batch, dict):
                got = batch["x"], batch["y"]
            else:
                got = (batch.x, batch.y) if isinstance(batch, Pairs) else tuple(batch)
            assert torch.equal(got[0], x[indices]), type(data)
            assert torch.equal(got[1], indices)


def test_a_loader_gives_its_data_size_order_and_collation() -> None:
    data = TensorDataset(NUMBERS)
    plain = [batch[0].tolist() for batch in batches(DataLoader(data, batch_size=20))]
    assert plain[0] == list(range(20))
    assert len(plain) == 6
    shuffled = batches(DataLoader(data, batch_size=20, shuffle=True, drop_last=True))
    assert len(shuffled) == 5 == len(list(shuffled))
    sampler = WeightedRandomSampler([1.0] * 3 + [0.0] * 100, num_samples=30)
    drawn = batches(DataLoader(data, batch_size=8, sampler=sampler), seed=4)
    first = [batch[0].tolist() for batch in drawn]
    assert sum(map(len, first)) == 30
    assert {i for b in first for i in b} == {0, 1, 2}
    again = batches(DataLoader(data, batch_size=8, sampler=sampler), seed=4)
    assert [batch[0].tolist() for batch in again] == first
    collated = batches(DataLoader(list(range(9)), batch_size=3, collate_fn=lambda samples: sum(samples)))
    assert list(collated) == [3, 12, 21]
    assert list(batches(DataLoader(list(range(5)), batch_size=3, collate_fn=tuple))) == [(0, 1, 2), (3, 4)]


def test_a_stream_is_taken_up_at_its_position() -> None:
    whole = seen(batches(Counting(), 8))
    assert whole[-1] == [48, 49]
    source = batches(Counting(), 8)
    iterator = iter(source)
    next(iterator), next(iterator)
    state = source.state_dict()
    rest = batches(Counting(), 4)
    rest.load_state_dict(state)
    assert [i for batch in seen(rest) for i in batch] == list(range(16, 50))
    assert seen(batches(Counting(), 10, rank=1, ranks=2))[0] == [5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    ("data", "size", "options", "said"),
    [
        (torch.empty(0, 3), 4, {}, "empty"),
        ((torch.zeros(3), torch.zeros(4)), 4, {}, r"data\[0\] has 3, data\[1\] has 4"),
        (torch.zeros(3), 0, {}, "batch_size is 0"),
        (torch.zeros(3), None, {}, "batch_size is None"),
        (torch.zeros(3), 4, {"drop_last": True}, "3 samples, and a batch at least 4"),
        (Counting(), 4, {"shuffle": True}, "a stream has one order"),
        (7, 4, {}, "int is not a source"),
        (torch.tensor(3.0), 4, {}, "Tensor is not a source"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), 4, {}, "data is a nested"),
        (torch.zeros(8), 4, {"rank": 2, "ranks": 2}, "rank is 2 of 2"),
        (torch.zeros(8), 4, {"rank": 0, "ranks": 5}, "4 for 5 ranks"),
    ],
)
def test_bad_input_is_named(data: Any, size: int, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        batches(data, size, **options)


def test_a_position_in_other_data_is_refused() -> None:
    source = batches(NUMBERS, 4)
    with pytest.raises(UsageError, match="50 samples; this one has 103"):
        source.load_state_dict({"seed": 0, "epoch": 0, "position": 8, "samples": 50})


def pace(pacing: Pacing, made: float, used: float, clock: list[float], *, fifth: float | None = None) -> bool:
    """Run batches through until a decision; True if the number of workers changed. fifth: what the fifth takes."""

    def source() -> Iterator[int]:
        for i in range(12):
            clock[0] += fifth if i == 4 and fifth is not None else made
            yield i

    for _ in pacing.timed(source()):
        clock[0] += used
    return pacing.count > 0


def test_workers_come_only_where_the_loop_waits_and_go_where_they_do_not_help(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("flatout.data.workers.time.perf_counter", lambda: clock[0])
    quick, needed = Pacing(8), Pacing(8)
    assert not pace(quick, 0.0005, 0.004, clock)
    assert quick.decided
    assert pace(needed, 0.03, 0.01, clock)
    assert needed.count == 3
    assert pace(needed, 0.001, 0.012, clock)
    assert needed.decided
    useless = Pacing(8)
    pace(useless, 0.03, 0.01, clock)
    assert not pace(useless, 0.001, 0.045, clock)
    assert useless.decided
    assert "without" in useless.reason
    assert Pacing(1).decided


@pytest.mark.parametrize(
    ("made", "used", "fifth", "ready"),
    [
        (0.03, 0.01, None, 2),  # three workers keep up
        (0.005, 0.02, None, 2),
        (0.005, 0.02, 0.1, 6),  # five are used while the slow one is made
        (0.03, 0.01, 0.12, 5),  # of twelve batches each of three workers has four
        (0.005, 0.02, 3.0, 8),
    ],
)
def test_as_many_batches_wait_as_are_used_while_the_slowest_is_made(
    made: float, used: float, fifth: float | None, ready: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr("flatout.data.workers.time.perf_counter", lambda: clock[0])
    pacing = Pacing(8)
    assert pace(pacing, made, used, clock, fifth=fifth)
    assert pacing.prefetch_factor == ready


class Growing(Dataset):  # type: ignore[type-arg]
    """Draws random numbers from the second epoch on, and counts what was asked of it."""

    epoch = 0

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + torch.rand(2) if self.epoch else torch.full((2,), float(index))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_set_that_changes_between_epochs_is_seen_as_it_is(workers: int) -> None:
    def epochs(data: Growing, of: Any) -> list[torch.Tensor]:
        found = []
        for data.epoch in range(2):
            found += list(of)
        return found

    data = Growing()
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    found = epochs(data, batches(data, 4, Plan(loader_workers=workers), seed=2))
    assert torch.equal(torch.rand(3), expected)
    other = Growing()
    again = epochs(other, batches(other, 6, Plan(loader_workers=0), seed=2))
    for ours, theirs in ((found[:3], again[:2]), (found[3:], again[2:])):
        torch.testing.assert_close(torch.cat(ours), torch.cat(theirs), rtol=0, atol=0)
    assert (torch.cat(found[3:]) % 1 != 0).all()


def test_indices_that_the_script_changes_are_seen() -> None:
    subset = Subset(TensorDataset(torch.arange(40.0)), list(range(4)))
    source = batches(subset, 4, shuffle=False)
    assert next(iter(source))[0].tolist() == [0, 1, 2, 3]
    subset.indices[:] = [7, 9, 8, 6]  # type: ignore[index]
    source.load_state_dict({**source.state_dict(), "position": 0})
    assert next(iter(source))[0].tolist() == [7, 9, 8, 6]


class Table:
    """Like a DataFrame: a key is a column."""

    def __getitem__(self, key: object) -> object:
        raise KeyError(key)

    def __len__(self) -> int:
        return 3

    def to_numpy(self) -> object:
        return torch.zeros(3, 2).numpy()


Table.__module__ = "pandas.core.frame"


@pytest.mark.parametrize(("data", "said"), [(Table(), "data"), ((Table(), torch.zeros(3)), r"data\[0\]")])
def test_a_table_is_named_with_the_conversion(data: Any, said: str) -> None:
    with pytest.raises(UsageError, match=rf"{said} is a Table; .*convert it: torch.tensor\({said}.to_numpy\(\)\)"):
        batches(data, 2)


def test_columns_are_arrays_and_never_lists() -> None:
    with pytest.raises(UsageError, match=r"a tuple of 2 lists; a tuple holds columns.*list\(zip\(inputs, targets\)\)"):
        batches(([[1.0], [2.0], [3.0]], [0, 1, 0]), 2)
    with pytest.raises(UsageError, match=r"data\[1\] is a list of 3; columns are tensors"):
        batches((torch.zeros(3, 2), [0, 1, 0]), 2)


def test_a_stream_that_is_shorter_than_where_it_stood_is_refused() -> None:
    source = batches(iter(torch.arange(5)), 2)
    source.load_state_dict({"epoch": 0, "position": 8})
    with pytest.raises(UsageError, match="ended after 5 samples; the saved position is after sample 8"):
        list(source)
    source = batches(iter(torch.arange(4)), 2)
    source.load_state_dict({"epoch": 0, "position": 4})
    assert list(source) == []  # the epoch's end
    assert source.epoch == 1


def test_a_collate_function_gets_the_rows_of_an_array() -> None:
    def scaled(rows: list[Any]) -> Any:
        return torch.stack([torch.as_tensor(row) for row in rows]).float() / 2

    loader = DataLoader(NUMBERS, 50, collate_fn=scaled)  # type: ignore[arg-type]
    for source in (batches(loader), batches(NUMBERS, 50, shuffle=False, collate_fn=scaled)):
        assert seen(source)[0] == (NUMBERS[:50] / 2).tolist()
    numbers = batches(NUMBERS.numpy(), 50, shuffle=False, collate_fn=scaled)
    assert seen(numbers)[0] == (NUMBERS[:50] / 2).tolist()
    with pytest.raises(UsageError, match="collate_fn is given with columns"):
        batches((NUMBERS, NUMBERS), 10, collate_fn=scaled)


@dataclass
class Halved(Dataset[Any]):
    x: Any
    other: Any

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index] / 2


def test_a_data_set_that_is_a_dataclass_makes_its_samples() -> None:
    data = Halved(NUMBERS, torch.zeros(3))
    for source in (batches(data, 103, shuffle=False), batches(DataLoader(data, 103))):
        assert seen(source) == [(NUMBERS / 2).tolist()]


def test_samples_of_a_loader_without_batches_are_stacked() -> None:
    pairs = [(torch.tensor([float(i)]), i) for i in range(10)]
    loader = DataLoader(pairs, batch_size=None)  # type: ignore[arg-type]
    x, y = next(iter(batches(loader, 4, shuffle=False)))
    assert (x.shape, y.tolist()) == ((4, 1), [0, 1, 2, 3])


class Lengths(IterableDataset[Any]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.zeros(i + 1) for i in range(4))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([Pairs(1, 2)] * 4, "2 samples cannot be put together: TypeError: .* found .*Pairs.*; torch stacks"),
        ([torch.zeros(i + 1) for i in range(4)], "cannot be put together: RuntimeError: stack expects each tensor"),
        (Lengths(), "cannot be put together: RuntimeError: stack expects each .* pass collate_fn="),
        ([{"x": 1}, {"y": 1}], "cannot be put together: KeyError"),
        (list, "the class list is not a source of batches"),
    ],
)
def test_samples_that_make_no_batch_are_named(data: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        seen(batches(data, 2))


def test_an_error_of_a_collate_function_stays_as_it_is() -> None:
    def broken(samples: list[object]) -> object:
        raise TypeError("of the function itself")

    with pytest.raises(TypeError, match=r"^of the function itself$"):
        seen(batches([1, 2], 2, collate_fn=broken))


def test_a_stream_says_once_that_its_end_is_left_out() -> None:
    """As other data does, by its first rank alone; not where it is evaluated, as that counts these samples too."""
    text = r"^an epoch leaves out 1 sample of 50: the last batch would have fewer than there are ranks \(2\)$"
    first, second = (batches(Counting(), 7, rank=rank, ranks=2) for rank in range(2))
    with whole_epoch(first):
        seen(first)
    with pytest.warns(UserWarning, match=text) as caught:
        seen(first, epochs=2)
    assert len(caught) == 1
    seen(second)
    seen(batches(Counting(), 7, rank=0, ranks=2, drop_last=True))
    seen(batches(Counting(), 7))


def test_an_iterator_goes_on_where_a_loop_left_it() -> None:
    source = batches(iter(range(50)), 10)
    for batch in source:
        if 25 in batch:
            break
    assert (source.position, seen(source)) == (30, [[*range(30, 40)], [*range(40, 50)]])
    assert (source.epoch, source.position) == (1, 0)
    with pytest.raises(UsageError, match="an iterator is exhausted"):
        seen(source)
    again = batches(iter(range(50)), 10)
    again.load_state_dict({"epoch": 0, "position": 20})  # in a new process it is read up to there
    assert seen(again)[0] == [*range(20, 30)]
    left = batches(iter(range(50)), 10)
    next(iter(left))
    left.load_state_dict({"epoch": 0, "position": 0})
    with pytest.raises(UsageError, match="10 samples of the iterator were read already"):
        seen(left)


def test_a_batch_sampler_says_whether_samples_are_shuffled() -> None:
    class Own(BatchSampler):
        pass

    def loader(kind: type[BatchSampler]) -> Any:
        return DataLoader(TensorDataset(NUMBERS), batch_sampler=kind(RandomSampler(range(103)), 8, drop_last=False))

    orders = {tuple(next(iter(batches(loader(BatchSampler), 50, seed=seed)))[0].tolist()) for seed in range(3)}
    assert len(orders) == 3
    with pytest.raises(UsageError, match="batch sampler"):
        batches(loader(Own), 50)
    assert next(iter(batches(loader(Own), 3, shuffle=False)))[0].tolist() == [0, 1, 2]


class Sometimes(Dataset[Any]):
    """Only the later samples are augmented, as those of one class are."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> float:
        return index + (float(torch.rand(())) if index >= 12 else 0.0)


def test_draws_that_begin_within_an_epoch_depend_on_the_sample_alone() -> None:
    expected = torch.cat([*batches(Sometimes(), 24, shuffle=False, seed=5)])
    torch.manual_seed(0)
    drawn = torch.rand(3)
    torch.manual_seed(0)
    found = torch.cat([*batches(Sometimes(), 4, Plan(loader_workers=0), shuffle=False, seed=5)])
    assert torch.equal(torch.rand(3), drawn)
    assert torch.equal(found, expected)


def test_a_restored_seed_is_that_of_the_random_draws_too() -> None:
    whole, other = (batches(Drawing(), 8, Plan(loader_workers=0), seed=seed) for seed in (5, 6))
    first, *rest = whole
    other.load_state_dict({"seed": 5, "epoch": 0, "position": 8, "samples": 24})
    for ours, theirs in zip(other, rest, strict=True):
        assert all(map(torch.equal, ours, theirs))
    assert len(first) == 4


def test_a_position_in_another_order_or_kind_of_data_is_refused() -> None:
    source, stream = batches(NUMBERS, 10, seed=1), batches(Counting(), 10)
    next(iter(source)), next(iter(stream))
    state: Any = source.state_dict()
    with pytest.raises(UsageError, match=r"samples that came in another order than here; .*same shuffle, sampler"):
        batches(NUMBERS, 10, shuffle=False).load_state_dict(state)
    batches(NUMBERS, 7, seed=2).load_state_dict(state)  # the seed is restored, and the batch size may differ
    batches(NUMBERS, 10, shuffle=False).load_state_dict({**state, "position": 0})  # the next epoch may
    with pytest.raises(UsageError, match="position counts samples of a stream; here the data is a data set"):
        source.load_state_dict(stream.state_dict())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="position counts samples of a data set; here the data is a stream"):
        stream.load_state_dict(state)


def test_the_checksum_of_an_order_is_that_of_all_that_was_handed_out() -> None:
    source, fresh = batches(NUMBERS, 10, seed=1), batches(NUMBERS, 10, seed=1)
    for at, _ in enumerate(source):
        if at % 3 == 0:
            fresh.load_state_dict(source.state_dict())  # type: ignore[arg-type]
            assert fresh.state_dict() == source.state_dict()


class Noisy(IterableDataset[Any]):
    """Draws from the global generators for each sample."""

    def __iter__(self) -> Iterator[Any]:
        offset = random.random()
        for _ in range(20):
            yield {"x": torch.rand(2) + offset}


def masked(samples: list[Any]) -> torch.Tensor:
    x = torch.stack([sample.pop("x") for sample in samples])  # as some collators change their samples
    return x * (torch.rand_like(x) < 0.5)


def test_a_stream_that_draws_is_resumed_exactly_and_leaves_the_training_alone() -> None:
    def source() -> Any:
        return batches(Noisy(), 4, collate_fn=masked, seed=3)

    torch.manual_seed(0)
    drawn = torch.rand(3)
    torch.manual_seed(0)
    whole = [*source()]
    assert torch.equal(torch.rand(3), drawn)
    cut = source()
    iterator = iter(cut)
    next(iterator), next(iterator), torch.rand(7)
    state = cut.state_dict()
    resumed = source()
    resumed.load_state_dict(state)
    assert all(map(torch.equal, resumed, whole[2:]))
    assert all(map(torch.equal, iterator, whole[2:]))
    shares = [next(iter(batches(Noisy(), 4, collate_fn=masked, seed=3, rank=rank, ranks=2))) for rank in range(2)]
    assert not torch.equal(shares[0] == 0, shares[1] == 0)


def test_a_stream_that_yields_other_samples_says_so() -> None:
    source = batches(iter([7, 8, 9, 10]), 2)
    next(iter(source))
    other = batches(iter([7, 80, 90, 100]), 2)
    other.load_state_dict(source.state_dict())  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="yielded another sample 2 than before; the run continues"):
        assert seen(other) == [[90, 100]]


def test_a_streams_workers_are_not_dropped_in_silence() -> None:
    with pytest.warns(UserWarning, match="loader's 2 workers are not used: a stream is read in this process"):
        source = batches(DataLoader(Counting(), batch_size=8, num_workers=2))
    assert seen(source) == seen(batches(Counting(), 8))


def test_a_subset_by_numbers_of_numpys_is_fetched_too() -> None:
    data = TensorDataset(torch.arange(40.0), torch.arange(40))
    subset = Subset(data, [*np.arange(30, 10, -1)])
    source = batches(subset, 8, shuffle=False)
    assert next(iter(source))[1].tolist() == list(range(30, 22, -1))
    kept = Whole(subset)
    kept.to(torch.device("cpu"))
    assert [one.tolist() for one in leaves(kept.batch(torch.tensor([0, 2]), 0))] == [[30, 28], [30, 28]]


@pytest.mark.parametrize("dtype", [">f4", "datetime64[s]", "U3"])
def test_dtypes_that_torch_lacks_are_named(dtype: str) -> None:
    with pytest.raises(UsageError, match=r"data\['x'\] is an array of dtype .*convert it: data\['x'\]\.astype\("):
        batches({"x": np.zeros(4, dtype=dtype)}, 2)


def test_arrays_of_any_strides_and_of_objects_are_taken() -> None:
    backwards = np.arange(12)[::-1]
    fields = np.zeros(12, dtype=[("a", "i1"), ("b", "i4")])["b"]
    texts = np.array([f"text {i}" for i in range(12)], dtype=object)
    short = np.arange(12, dtype=np.uint16)
    batch = next(iter(batches((backwards, fields, texts, short), 3, shuffle=False)))
    assert batch[3].tolist() == [0, 1, 2]
    assert (batch[0].tolist(), batch[1].tolist()) == ([11, 10, 9], [0, 0, 0])
    assert batch[2].tolist() == ["text 0", "text 1", "text 2"]


class OnlyHere(Dataset[Any]):
    """Cannot be used in another process, like one that holds tensors on a GPU."""

    def __init__(self) -> None:
        self.home = os.getpid()

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> int:
        if os.getpid() != self.home:
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
        return index


@pytest.mark.slow
@pytest.mark.skipif(start_method() != "fork", reason="no workers are started without being asked for")
def test_workers_that_nobody_asked_for_never_end_a_run() -> None:
    source = batches(OnlyHere(), 8, shuffle=False)
    source._pacing.decided, source._pacing.count = True, 2  # type: ignore[union-attr]
    assert seen(source) == [[*range(start, start + 8)] for start in (0, 8, 16)]
    count, reason = source.workers  # type: ignore[union-attr]
    assert count == 0
    assert "the workers failed: RuntimeError" in reason
    asked = batches(OnlyHere(), 8, Plan(loader_workers=1))
    with pytest.raises(RuntimeError, match="Cannot re-initialize CUDA"):
        seen(asked)


def test_workers_share_the_machine_with_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flatout.data.batches.usable_cores", lambda: 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    source: Any = batches(Drawing(), 8)
    assert source._pacing.cores == 2
    monkeypatch.setattr("flatout.data.batches.start_method", lambda: "spawn")
    source = batches(Drawing(), 8)
    assert source._pacing.decided
    assert source.workers == (0, "processes start by 'spawn' here, which imports the script again")


def test_workers_have_room_for_their_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "SHARED_MEMORY", tmp_path)
    batch = torch.zeros(1024**2, dtype=torch.uint8)
    for free_mib, fit in ((64, 7), (20, 2), (8, 0)):
        usage = shutil.disk_usage(tmp_path)._replace(free=free_mib * 1024**2)
        monkeypatch.setattr(shutil, "disk_usage", lambda path, usage=usage: usage)
        assert loading._workers_that_fit({"x": batch}, 16) == fit
    pacing = Pacing(8)
    pacing._made, pacing._used = [0.03] * 9, [0.01] * 9
    assert not pacing._decide(batch)
    assert (pacing.decided, pacing.count) == (True, 0)
    assert "8 MiB free: too little for the batches of a worker" in pacing.reason


class Stumbling:
    """An iterator that fails once in the middle of a batch."""

    def __init__(self) -> None:
        self.at, self.failed = 0, False

    def __iter__(self) -> Stumbling:
        return self

    def __next__(self) -> torch.Tensor:
        if self.at == 5 and not self.failed:
            self.failed = True
            raise OSError("not now")
        if self.at == 12:
            raise StopIteration
        self.at += 1
        return torch.tensor(self.at)


def test_samples_of_a_batch_that_failed_are_in_the_next_one() -> None:
    source = batches(Stumbling(), 4)
    found = next(iter(source)).tolist()
    with pytest.raises(OSError, match="not now"):
        next(iter(source))
    assert found + [i for batch in source for i in batch.tolist()] == list(range(1, 13))


LINE = TensorDataset(torch.arange(24.0))


@pytest.mark.parametrize(
    ("data", "options"),
    [
        (LINE, {"batch_size": 5}),
        (LINE, {"batch_size": 5, "shuffle": False}),
        (LINE, {"length": [1, 2, 3] * 8, "tokens": 9}),
        (DataLoader(LINE, 5, sampler=range(23, -1, -1)), {}),
        (DataLoader(LINE, batch_sampler=[[3, 4], [9]]), {}),
    ],
)
def test_the_order_is_on_the_cpu_whatever_the_default_device_is(data: Any, options: dict[str, Any]) -> None:
    def epoch() -> list[float]:
        return [value for (batch,) in batches(data, seed=1, **options) for value in batch.tolist()]

    plain = epoch()
    with odd_defaults():
        assert epoch() == plain
