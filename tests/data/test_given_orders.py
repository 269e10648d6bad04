"""Batches as a DataLoader's own batch sampler makes them, resumed at any sample."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from flatout.data import given_orders
from flatout.data.batches import batches
from flatout.errors import UsageError

DATA = TensorDataset(torch.arange(23))


class Buckets:
    """Batches of uneven lengths, in another order each epoch, as those for ragged sequences are."""

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(20).tolist()
        edges = [0, 3, 4, 11, 15, 20]
        return iter([order[edges[i] : edges[i + 1]] for i in range(5)])


def epoch(source: Any) -> list[list[int]]:
    return [batch[0].tolist() for batch in source]


def test_a_batch_sampler_makes_the_batches() -> None:
    source = batches(DataLoader(DATA, batch_sampler=Buckets()), seed=1)
    first, second = epoch(source), epoch(source)
    assert [len(batch) for batch in first] == [3, 1, 7, 4, 5]
    assert len(source) == 5
    assert first != second
    assert len({index for batch in first for index in batch}) == 20
    again = batches(DataLoader(DATA, batch_sampler=Buckets()), seed=1)
    assert [epoch(again), epoch(again)] == [first, second]
    given = [[0, 1], [2, 3, 4]]
    assert epoch(batches(DataLoader(DATA, batch_sampler=given))) == given


def test_it_goes_on_at_the_next_batch_and_within_one() -> None:
    whole = batches(DataLoader(DATA, batch_sampler=Buckets()), seed=1)
    epoch(whole)
    expected = epoch(whole)
    for taken in range(6):
        source = batches(DataLoader(DATA, batch_sampler=Buckets()), seed=1)
        source.load_state_dict({**source.state_dict(), "epoch": 1, "position": sum(map(len, expected[:taken]))})
        assert epoch(source) == expected[taken:]
    source.load_state_dict({**source.state_dict(), "epoch": 1, "position": 5})
    assert epoch(source) == [expected[2][1:], *expected[3:]]


def test_ranks_share_each_batch() -> None:
    loader = DataLoader(DATA, batch_sampler=[[0, 1, 2, 3], [4, 5, 6]])
    shares = [epoch(batches(loader, rank=rank, ranks=2)) for rank in range(2)]
    assert [sorted(a + b) for a, b in zip(*shares, strict=True)] == [[0, 1, 2, 3], [4, 5, 6]]


def test_a_generator_of_the_samplers_own_gives_the_same_epoch_again() -> None:
    def source() -> Any:
        generator = torch.Generator().manual_seed(5)
        sampler = BatchSampler(RandomSampler(DATA, generator=generator), 4, drop_last=True)
        return batches(DataLoader(DATA, batch_sampler=sampler), seed=2)

    whole = source()
    first, second = epoch(whole), epoch(whole)
    resumed = source()
    resumed.load_state_dict({**resumed.state_dict(), "epoch": 1, "position": 8})
    assert epoch(resumed) == second[2:]
    assert first != second


def test_what_cannot_be_shared_or_used_is_refused() -> None:
    shares = DistributedSampler(DATA, num_replicas=2, rank=0)
    with pytest.raises(UsageError, match="is a DistributedSampler; each rank's share of the whole"):
        batches(DataLoader(DATA, 4, sampler=shares), rank=0, ranks=2)
    for batch_size, loader in (
        (None, DataLoader(DATA, batch_sampler=BatchSampler(shares, 4, drop_last=False))),
        (8, DataLoader(DATA, batch_sampler=BatchSampler(shares, 4, drop_last=False))),
    ):
        with pytest.raises(UsageError, match="is a DistributedSampler; each rank's share of the whole"):
            batches(loader, batch_size, rank=0, ranks=2)
    with pytest.raises(UsageError, match="the batch sampler made no batch in epoch 0; an epoch has at least one batch"):
        batches(DataLoader(DATA, batch_sampler=[]))
    with pytest.raises(UsageError, match=r"a single batch, of fewer samples than the 2 ranks; .*make larger batches"):
        batches(DataLoader(DATA, batch_sampler=[[3]]), rank=0, ranks=2)
    with pytest.raises(UsageError, match="made an empty batch"):
        batches(DataLoader(DATA, batch_sampler=[[0], []]))
    with pytest.raises(UsageError, match=r"makes no batches; .*pass batch_size=64"):
        batches(DataLoader(DATA, batch_size=None))


def test_no_rank_is_left_without_a_sample() -> None:
    given = [[0, 1, 2, 3], [4, 5, 6], [7]]
    for rank, share in enumerate(([[0, 1], [4]], [[2, 3], [5, 6]])):
        source = batches(DataLoader(DATA, batch_sampler=given), rank=rank, ranks=2)
        rest: Any = source.too_few_for_ranks()
        assert (len(source), epoch(source), rest[0].tolist()) == (2, share, [7])
    assert epoch(batches(DataLoader(DATA, batch_sampler=given))) == given
    with pytest.raises(UsageError, match=r"made a batch of 1 for 2 ranks; .*make larger batches"):
        batches(DataLoader(DATA, batch_sampler=[*reversed(given)]), rank=0, ranks=2)


class OwnGenerator:
    """Draws from a generator that nothing can seed: another order each time."""

    def __init__(self, size: int | None = None) -> None:
        self.rng, self.size = np.random.default_rng(0), size

    def __len__(self) -> int:
        return 12 if self.size is None else 12 // self.size

    def __iter__(self) -> Iterator[Any]:
        order = self.rng.permutation(12)
        return iter(order.tolist() if self.size is None else order.reshape(-1, self.size).tolist())


TWO_ORDERS = "drew two orders for the same epoch; it draws from a generator of its own"


@pytest.mark.filterwarnings("ignore:.* drew two orders for the same epoch")
@pytest.mark.parametrize("size", [None, 4])
def test_an_order_that_does_not_come_again_is_gone_on_with_or_refused(size: int | None) -> None:
    def source() -> Any:
        sampler: Any = OwnGenerator(size)
        options = {"batch_size": 4, "sampler": sampler} if size is None else {"batch_sampler": sampler}
        return batches(DataLoader(DATA, **options))

    whole = source()
    refused = []
    for _ in range(3):
        begun = next(iter(whole))[0].tolist()
        state, expected, resumed = whole.state_dict(), epoch(whole), source()
        assert sorted(index for batch in (begun, *expected) for index in batch) == list(range(12))
        try:
            resumed.load_state_dict(state)
        except UsageError as error:
            refused.append(str(error))
        else:
            assert epoch(resumed) == expected
    said = "another order than here; an epoch goes on in the order in which it began, and the sampler draws from a gene"
    assert len([one for one in refused if said in one]) == len(refused) > 0


def test_a_sampler_with_a_generator_of_its_own_is_named_once() -> None:
    source = batches(DataLoader(DATA, 4, sampler=OwnGenerator()))
    with pytest.warns(UserWarning, match=f"the sampler, an OwnGenerator, {TWO_ORDERS}"):
        assert len(epoch(source)) == 3
    assert sorted(index for batch in epoch(source) for index in batch) == list(range(12))
    with pytest.warns(UserWarning, match=f"the batch sampler, an OwnGenerator, {TWO_ORDERS}"):
        batches(DataLoader(DATA, batch_sampler=OwnGenerator(4)))


class Once:
    """Can be iterated over only once."""

    def __init__(self) -> None:
        self.begun = False

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[int]:
        if self.begun:
            raise RuntimeError("it has begun")
        self.begun = True
        return iter(range(12))


def test_an_epoch_needs_one_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    source = batches(DataLoader(DATA, 4, sampler=Once()))
    assert len(source) == 3 == len(epoch(source))
    monkeypatch.setattr(given_orders, "MOST_COMPARED", 11)
    assert len(epoch(batches(DataLoader(DATA, 4, sampler=OwnGenerator())))) == 3  # too long to be drawn again


class Varying:
    """Two samples more in each epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 4 + 2 * self.epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))


class Claiming:
    """Has another length than it says."""

    def __init__(self, claimed: int, drawn: int) -> None:
        self.claimed, self.drawn = claimed, drawn

    def __len__(self) -> int:
        return self.claimed

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.drawn))


def test_an_epoch_has_as_many_samples_as_the_sampler_draws() -> None:
    source: Any = batches(DataLoader(DATA, 2, sampler=Varying()))
    assert [(len(source), epoch(source)) for _ in range(2)] == [(2, [[0, 1], [2, 3]]), (3, [[0, 1], [2, 3], [4, 5]])]
    next(iter(source))
    resumed = batches(DataLoader(DATA, 2, sampler=Varying()))
    resumed.load_state_dict(source.state_dict())
    assert epoch(resumed) == [[2, 3], [4, 5], [6, 7]]
    for claimed, drawn in ((10, 5), (4, 10)):
        claiming = batches(DataLoader(DATA, 2, sampler=Claiming(claimed, drawn)))
        assert sum(map(len, epoch(claiming))) == drawn
    rest: Any = batches(DataLoader(DATA, 4, sampler=Claiming(4, 9)), rank=0, ranks=2).too_few_for_ranks()
    assert rest[0].tolist() == [8]


def test_an_epoch_without_a_batch_is_refused() -> None:
    with pytest.raises(UsageError, match=r"the sampler drew no sample in epoch 0; .*let its __iter__ start over"):
        epoch(batches(DataLoader(DATA, 2, sampler=Claiming(4, 0))))
    with pytest.raises(UsageError, match=r"in epoch 0 the sampler drew 3 samples, and a batch at least 4; .*drop_last"):
        epoch(batches(DataLoader(DATA, 4, sampler=Claiming(4, 3), drop_last=True)))


def test_positions_are_whole_numbers() -> None:
    for odd, said in (("a", "'a'"), ((0, 3), "a tuple"), (0.5, "0.5")):
        with pytest.raises(UsageError, match=rf"the sampler drew {said}; it draws the positions of samples, which are"):
            epoch(batches(DataLoader(DATA, 2, sampler=[0, odd])))
        with pytest.raises(UsageError, match=rf"the batch sampler drew {said}; .*look the key up in the data set's"):
            batches(DataLoader(DATA, batch_sampler=[[0, odd]]))
    for batch, said in ((3, "3"), ("ab", "'ab'")):
        with pytest.raises(UsageError, match=rf"the batch sampler drew {said}; a batch is a list of the positions"):
            batches(DataLoader(DATA, batch_sampler=[batch]))
    kinds = [np.int64(3), torch.tensor(2), 1]
    assert epoch(batches(DataLoader(DATA, 3, sampler=kinds))) == [[3, 2, 1]]
    assert epoch(batches(DataLoader(DATA, batch_sampler=[kinds, np.arange(2)]))) == [[3, 2, 1], [0, 1]]


class Beyond(Dataset[Any]):
    """Has any sample, whatever its length says: a buffer that grows, or positions with a view in them."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def test_a_sampler_may_go_beyond_the_length() -> None:
    drawn = [50, 3, -1, -60, 2**40]
    source = batches(DataLoader(Beyond(10), 2, sampler=drawn))
    assert [epoch_of(source), epoch_of(source)] == [[[50, 3], [-1, -60], [2**40]]] * 2
    # a length that no memory has room for
    assert epoch_of(batches(DataLoader(Beyond(10**15), 2, sampler=[10**14, 1]))) == [[10**14, 1]]


def epoch_of(source: Any) -> list[list[int]]:
    return [batch.tolist() for batch in source]


class Endless:
    def __init__(self, one: Any) -> None:
        self.one = one

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[Any]:
        return itertools.repeat(self.one)


def test_a_sampler_that_does_not_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(given_orders, "LEAST_ENDLESS", 1000)
    with pytest.raises(UsageError, match="the sampler, an Endless, drew over 1,000 positions in an epoch"):
        epoch(batches(DataLoader(DATA, 4, sampler=Endless(1))))
    with pytest.raises(UsageError, match="the batch sampler, an Endless, drew over 1,000 positions"):
        batches(DataLoader(DATA, batch_sampler=Endless([0, 1, 2])))
    long = DataLoader(DATA, 100, sampler=RandomSampler(DATA, replacement=True, num_samples=20_000))
    assert len(epoch(batches(long))) == 200  # it says itself how many there are


def test_ranks_may_draw_orders_of_their_own() -> None:
    source = batches(DataLoader(DATA, 4, sampler=OwnGenerator()), rank=1, ranks=2)
    with pytest.warns(UserWarning, match="each of the 2 ranks, .* may draw another one: some samples then come twice"):
        epoch(source)
