"""Any data for `fit`: what it is taken for, and what cannot be resumed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from flatout.data.batches import Batches, batches
from flatout.data.checksums import checksum
from flatout.data.given_batches import GivenBatches, batches_of
from flatout.data.stream import Stream
from flatout.errors import UsageError
from flatout.plan import Plan
from flatout.train.fit import fit
from flatout.train.loss import supervised
from flatout.train.patience import Patience
from flatout.train.step import TrainStep

X = torch.randn(50, 6, generator=torch.Generator().manual_seed(4))
Y = X[:, :3].argmax(1)
CPU = torch.device("cpu")


def training() -> TrainStep:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 3))
    return TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), supervised(nn.CrossEntropyLoss()))


class Samples(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(zip(X, Y, strict=True))


class Rows:
    """A data set as Hugging Face's are: neither torch's nor a list."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> Any:
        return X[index], Y[index]

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(50))


def slices() -> list[Any]:
    return [(X[i : i + 20], Y[i : i + 20]) for i in range(0, 50, 20)]


LOADER_OF_BATCHES: Any = DataLoader(slices(), batch_size=None, shuffle=True)  # type: ignore[arg-type]
KINDS: dict[str, tuple[Any, type, int]] = {
    "columns": ((X, Y), Batches, 1),
    "arrays": ((X.numpy(), Y.numpy()), Batches, 1),
    "a loader": (DataLoader(TensorDataset(X, Y), 20), Batches, 3),
    "a data set": (TensorDataset(X, Y), Batches, 1),
    "rows": (Rows(), Batches, 1),
    "a stream": (Samples(), Stream, 1),
    "a list of batches": (slices(), GivenBatches, 3),
    "a loader of batches": (LOADER_OF_BATCHES, GivenBatches, 3),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_data_is_taken_for(kind: str) -> None:
    data, made, steps = KINDS[kind]
    assert type(batches_of(data, Plan(), CPU)) is made
    assert fit(training(), data, epochs=2).steps == 2 * steps


def test_an_iterator_of_batches_is_read_once() -> None:
    with pytest.raises(UsageError, match="epochs is 2, and the data is an iterator; it can be read only once"):
        fit(training(), iter(slices()), epochs=2)
    assert fit(training(), iter(slices()), epochs=1).steps == 3
    with pytest.raises(UsageError, match="yielded no batch in epoch 1; an iterator is exhausted after one epoch"):
        fit(training(), iter(slices()), steps=9)


class Shuffled:
    """An order of its own generator, which nobody saves."""

    def __init__(self, generator: np.random.Generator) -> None:
        self.generator = generator

    def __iter__(self) -> Iterator[Any]:
        for start in self.generator.permutation(10):
            yield X[start * 5 : start * 5 + 5], Y[start * 5 : start * 5 + 5]


class ByEpoch:
    def set_epoch(self, epoch: int) -> None:
        self.order = np.random.default_rng(epoch).permutation(10)

    def __iter__(self) -> Iterator[Any]:
        return ((X[at * 5 : at * 5 + 5], Y[at * 5 : at * 5 + 5]) for at in self.order)


def weights(step: TrainStep) -> torch.Tensor:
    return torch.cat([one.detach().flatten() for one in step.model.parameters()])


def test_an_iterable_resumes_where_the_same_batches_come_again(tmp_path: Path) -> None:
    whole = training()
    fit(whole, ByEpoch(), epochs=3)
    for steps in (4, 10, 17, 30):
        parts = training()
        found = fit(parts, ByEpoch(), epochs=3, steps=steps, checkpoints=tmp_path)
        assert parts.steps == steps
    assert found.epochs == 2  # nobody knows that nothing follows
    assert fit(parts, ByEpoch(), epochs=3, checkpoints=tmp_path).epochs == 3
    assert torch.equal(weights(parts), weights(whole))


def test_other_batches_than_before_are_refused(tmp_path: Path) -> None:
    fit(training(), Shuffled(np.random.default_rng(0)), steps=4, checkpoints=tmp_path / "a")
    with pytest.raises(UsageError, match=r"the data yielded another batch 4 than before; .*flatout.batches"):
        fit(training(), Shuffled(np.random.default_rng(1)), steps=8, checkpoints=tmp_path / "a")
    with pytest.raises(UsageError, match="the data ended after 3 of the 4 batches"):
        fit(training(), slices(), steps=8, checkpoints=tmp_path / "a")
    with pytest.raises(
        UsageError, match=r"the checkpoint does not fit|saved position is in a data set|position counts samples"
    ):
        fit(training(), (X, Y), steps=8, checkpoints=tmp_path / "b") and fit(
            training(), slices(), steps=9, checkpoints=tmp_path / "b"
        )


def test_parts_that_contradict_one_another_are_refused(tmp_path: Path) -> None:
    step = training()
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(step.optimizer)
    options: Any = {"epochs": 1, "metric": "accuracy", "evaluation": lambda: {"accuracy": 0.5}}
    with pytest.raises(UsageError, match=r"'accuracy' Patience\(best=...\) says 'max', ReduceLROnPlateau.* says 'min'"):
        fit(step, (X, Y), patience=Patience(epochs=2, best="max"), epoch_scheduler=plateau, **options)
    with pytest.raises(UsageError, match="whether the highest or the lowest is best has to be given"):
        fit(step, (X, Y), patience=2, **options)
    with pytest.raises(UsageError, match="patience reads 'loss', and there is no evaluation"):
        fit(step, (X, Y), epochs=2, patience=2, checkpoints=tmp_path)
    assert fit(step, (X, Y), epochs=2, metric="train_loss", patience=2, checkpoints=tmp_path).epochs == 2
    ema = AveragedModel(step.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    with pytest.raises(UsageError, match="ema is given, and in objects too"):
        fit(step, (X, Y), epochs=1, ema=ema, objects={"ema": ema})
    with pytest.raises(UsageError, match="the epoch_scheduler is that of another optimizer"):
        fit(training(), (X, Y), epochs=1, epoch_scheduler=plateau)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_sparse_batches_are_compared_as_well() -> None:
    dense = torch.eye(8)
    for batch in (dense.to_sparse(), dense.to_sparse_csr()):
        assert checksum((batch, 1)) == checksum((batch.clone(), 1))
        assert checksum((batch, 1)) != checksum((2 * batch, 1))
    moved = dense.roll(1, 0).to_sparse()
    assert checksum(moved) != checksum(dense.to_sparse())


def test_what_is_no_tensor_counts_as_well() -> None:
    batch = {"x": X, "names": ["a", "b"], "ids": np.arange(3), "texts": np.array(["c", None], dtype=object), "odd": {3}}
    assert checksum(batch) == checksum({**batch, "x": X.clone(), "ids": np.arange(3), "odd": {4}})
    for other in ({"names": ["a", "c"]}, {"ids": np.arange(1, 4)}, {"texts": np.array(["d", None], dtype=object)}):
        assert checksum({**batch, **other}) != checksum(batch)


class Scaling(DataLoader[Any]):
    """A loader that changes its batches."""

    def __iter__(self) -> Any:
        for x, y in super().__iter__():
            yield 0 * x, y


def test_a_loader_of_a_class_of_its_own_is_taken_as_it_is(tmp_path: Path) -> None:
    loader = Scaling(TensorDataset(X, Y), 20)
    seen: list[float] = []
    step = training()
    inner = step.loss_fn
    step.loss_fn = lambda model, batch: (seen.append(float(batch[0].abs().sum())), inner(model, batch))[1]
    fit(step, loader, epochs=1)
    assert seen == [0.0, 0.0, 0.0]
    with pytest.raises(UsageError, match="the loader is a Scaling, which makes batches in a way of its own"):
        batches(loader)


def test_conjugated_and_negated_batches_are_compared_as_their_values(tmp_path: Path) -> None:
    z = torch.view_as_complex(torch.randn(6, 2, generator=torch.Generator().manual_seed(0)))
    for odd in (z.conj(), z.conj().imag):
        assert checksum(odd) == checksum(odd.clone().resolve_conj().resolve_neg())
