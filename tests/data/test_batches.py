"""The order of batches, which no number of workers, ranks or samples a batch may change; and any data as a source."""

from __future__ import annotations

import random
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

from flatout.data.batches import batches
from flatout.data.workers import Pacing
from flatout.errors import UsageError
from flatout.plan import Plan

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
        (7, 4, {}, "int is no source"),
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
