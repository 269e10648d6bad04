"""Batches as a DataLoader's own batch sampler makes them, resumed at any sample."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler

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
