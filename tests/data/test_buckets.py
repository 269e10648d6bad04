"""Batches by length: each sample once an epoch, within the budget, whoever makes them and wherever a run resumes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset

from flatout.data.batches import batches
from flatout.errors import UsageError
from flatout.plan import Plan


class Texts(Dataset[Any]):
    """Sample i is `lengths[i]` times i."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.lengths[index],), index)


def padded(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=-1)


def source_of(lengths: list[int], **options: Any) -> Any:
    return batches(Texts(lengths), length=lengths, collate_fn=padded, **options)


def indices(batch: torch.Tensor) -> list[int]:
    return batch[:, 0].tolist()


LENGTHS = [1 + (i * i) % 37 for i in range(400)]


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=80),
    tokens=st.integers(12, 60),
    most=st.none() | st.integers(1, 9),
    cut=st.integers(0, 40),
    epoch=st.integers(0, 2),
)
def test_each_sample_comes_once_an_epoch_resumed_or_not(
    lengths: list[int], tokens: int, most: int | None, cut: int, epoch: int
) -> None:
    def source() -> Any:
        made = source_of(lengths, tokens=tokens, batch_size=most, seed=2)
        made.epoch = epoch
        return made

    whole = [(indices(batch), batch.numel()) for batch in source()]
    assert sorted(index for one, _ in whole for index in one) == list(range(len(lengths)))
    assert all(places <= tokens for _, places in whole)
    assert most is None or all(len(one) <= most for one, _ in whole)
    first, found = source(), []
    for i, batch in enumerate(first):
        if i == cut:
            break
        found.append(indices(batch))
        state = first.state_dict()
    if cut and found and len(found) < len(whole):
        rest = source_of(lengths, tokens=tokens, batch_size=most, seed=9)
        rest.load_state_dict(state)
        found += [indices(batch) for batch in rest]
        assert found == [one for one, _ in whole]


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=6, max_size=60), ranks=st.integers(1, 4))
def test_ranks_share_each_batch(lengths: list[int], ranks: int) -> None:
    shares = [
        [indices(batch) for batch in source_of(lengths, tokens=40, seed=1, rank=rank, ranks=ranks)]
        for rank in range(ranks)
    ]
    assert len({len(one) for one in shares}) == 1
    seen = sorted(index for share in shares for one in share for index in one)
    assert len(seen) == len(set(seen)) > len(lengths) - ranks


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_do_not_change_the_order(workers: int) -> None:
    expected = [indices(batch) for batch in source_of(LENGTHS, tokens=200)]
    found = source_of(LENGTHS, tokens=200, plan=Plan(loader_workers=workers))
    assert [indices(batch) for batch in found] == expected


def test_epochs_differ_and_little_is_padded() -> None:
    source = source_of(LENGTHS, tokens=200, seed=3)
    share = source.padding_share
    first = list(source)
    assert share == pytest.approx(sum(int((batch < 0).sum()) for batch in first) / sum(b.numel() for b in first))
    second = list(source)
    assert [indices(batch) for batch in first] != [indices(batch) for batch in second]
    assert len(first) > 30
    mixed = batches(Texts(LENGTHS), 10, collate_fn=padded)
    plain = sum(int((batch < 0).sum()) for batch in mixed) / sum(
        b.numel() for b in batches(Texts(LENGTHS), 10, collate_fn=padded)
    )
    assert share < 0.1 < plain
    assert mixed.padding_share is None
    lengths = [batch.shape[1] for batch in first]
    assert lengths != sorted(lengths)
    in_order = [batch.shape[1] for batch in source_of(LENGTHS, tokens=200, shuffle=False)]
    assert in_order == sorted(in_order)


def test_a_number_of_samples_instead_of_tokens() -> None:
    source = source_of(LENGTHS, batch_size=16)
    made = list(source)
    assert [len(batch) for batch in made].count(16) == 25 == len(made)
    assert source.epoch == 1
    assert sum(int((batch < 0).sum()) for batch in made) / sum(b.numel() for b in made) < 0.1


def test_a_function_and_a_loader() -> None:
    texts = Texts(LENGTHS)
    expected = [indices(batch) for batch in source_of(LENGTHS, tokens=100)]
    assert [indices(one) for one in batches(texts, tokens=100, length=len, collate_fn=padded)] == expected
    loader = DataLoader(texts, batch_size=4, shuffle=True, collate_fn=padded)
    assert [indices(one) for one in batches(loader, tokens=100, length=len)] == expected
    assert [
        indices(one) for one in batches(texts, tokens=100, length=torch.tensor(LENGTHS), collate_fn=padded)
    ] == expected


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match="a budget of tokens needs the samples' lengths; pass length=len"):
        batches(Texts([1, 2]), tokens=10)
    with pytest.raises(UsageError, match=r"the longest sample has 37 tokens, and tokens is 30; .*pass tokens=37"):
        source_of(LENGTHS, tokens=30)
    with pytest.raises(UsageError, match="each of 2 ranks; pass tokens=74"):
        source_of(LENGTHS, tokens=40, rank=0, ranks=2)
    with pytest.raises(UsageError, match="length has 2 entries; the data has 3 samples"):
        batches(Texts([1, 2, 3]), tokens=10, length=[1, 2])
    with pytest.raises(UsageError, match=r"a sample's length is 1.5"):
        batches(Texts([1, 2]), tokens=10, length=[1, 1.5])
    with pytest.raises(UsageError, match="length is given for a stream"):
        batches(Stream(), tokens=10, length=len)
    with pytest.raises(UsageError, match="batch_size is None"):
        batches(Texts([1, 2]), length=len)
    with pytest.raises(UsageError, match="drop_last is given together with tokens"):
        source_of([1, 2], tokens=4, drop_last=True)
    source = source_of(LENGTHS, tokens=100)
    next(iter(source))
    other = source_of(LENGTHS, tokens=200)
    with pytest.raises(UsageError, match=r"an epoch of tokens 100, .*; here is tokens 200"):
        other.load_state_dict(source.state_dict())
    other.load_state_dict({**source.state_dict(), "epoch": 1, "position": 0})
    assert other.epoch == 1
