"""Evaluation: exact over ragged batches, and the model afterwards as it was."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

from flatout.data.batches import batches
from flatout.errors import UsageError
from flatout.plan import Plan
from flatout.train.evaluate import evaluate
from flatout.train.fit import fit
from flatout.train.loss import supervised
from flatout.train.step import TrainStep


def test_the_mean_is_over_items_not_over_batches() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 4))
    x, y = torch.randn(41, 6), torch.randint(0, 4, (41,))
    y[::5] = -100
    parts = [(x[i : i + 16], y[i : i + 16]) for i in range(0, 41, 16)]
    figures = evaluate(model, parts, supervised(nn.CrossEntropyLoss()).metrics)
    with torch.no_grad():
        scores = model.eval()(x)
    assert figures["loss"] == pytest.approx(float(nn.functional.cross_entropy(scores, y)), rel=1e-5)
    assert figures["accuracy"] == pytest.approx(float((scores.argmax(1) == y)[y >= 0].float().mean()))
    reduced = evaluate(model, parts, supervised(nn.CrossEntropyLoss()).metrics, plan=Plan(precision="bf16"))
    assert 0 < abs(reduced["loss"] - figures["loss"]) < 0.05


def test_modes_are_put_back_after_an_error_too() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5), nn.BatchNorm1d(3))
    model[0].eval()

    def metrics(model: Any, batch: Any) -> Any:
        assert not any(module.training for module in model.modules())
        assert not torch.is_grad_enabled()
        if len(batch) == 1:
            raise ValueError("mine")
        return {"items": torch.ones(len(batch))}

    assert evaluate(model, [torch.zeros(4, 3)], metrics) == {"items": 1.0}
    with pytest.raises(ValueError, match="mine"):
        evaluate(model, [torch.zeros(1, 3)], metrics)
    assert [module.training for module in model.modules()] == [True, False, True, True]


def test_bad_input_is_named() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match="no batch to evaluate"):
        evaluate(model, [], lambda model, batch: {})
    with pytest.raises(UsageError, match="metrics returned an empty dict; it returns a dict with a name for each"):
        evaluate(model, [torch.zeros(1, 2)], lambda model, batch: {})
    with pytest.raises(UsageError, match="metrics returned a Tensor"):
        evaluate(model, [torch.zeros(1, 2)], lambda model, batch: model(batch))  # type: ignore[arg-type, return-value]


def test_a_mean_over_a_batch_counts_as_often_as_the_batch_has_samples() -> None:
    parts = [(torch.ones(90, 2), torch.zeros(90)), (torch.full((10, 2), 3.0), torch.zeros(10))]

    def metrics(model: Any, batch: Any) -> dict[str, Any]:
        x = batch[0]
        return {"tensor": x.mean(), "number": float(x.mean()), "array": x.mean(1).numpy(), "pair": (x.sum(), x.numel())}

    figures = evaluate(nn.Linear(2, 2), parts, metrics)
    assert figures == pytest.approx(dict.fromkeys(("tensor", "number", "array", "pair"), 1.2))


def test_a_mean_over_nobody_knows_how_many_is_refused() -> None:
    with pytest.raises(UsageError, match=r"one value as the figure 'a'; .*return a pair: \(sum over the items"):
        evaluate(nn.Linear(2, 2), [{"x": torch.ones(3), "y": torch.ones(2)}], lambda model, batch: {"a": 1.0})


def test_a_summed_loss_is_given_per_target() -> None:
    model, x, y = nn.Linear(4, 3), torch.randn(6, 4), torch.tensor([0, 1, 2, -100, 1, 0])
    parts = [(x[:4], y[:4]), (x[4:], y[4:])]
    mean, summed = (
        evaluate(model, parts, supervised(nn.CrossEntropyLoss(reduction=how)).metrics) for how in ("mean", "sum")
    )
    assert summed == pytest.approx(mean)


class Caching(nn.Module):
    """Makes a table when it is first needed, as rotary embeddings and masks are made."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.last = nn.Embedding(10, 4), nn.Linear(4, 3)
        self.table: torch.Tensor | None = None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.linspace(0, 1, tokens.shape[1])[:, None]
        return self.last(self.embedding(tokens) * self.table).mean(1)


def test_what_a_model_keeps_from_an_evaluation_can_be_trained_with() -> None:
    model, loss_fn = Caching(), supervised(nn.CrossEntropyLoss())
    batch = torch.randint(0, 10, (8, 5)), torch.randint(0, 3, (8,))
    evaluate(model, [batch], loss_fn.metrics)
    loss_fn(model, batch).backward()
    assert model.embedding.weight.grad is not None


def test_batches_are_brought_to_the_models_device() -> None:
    def metrics(model: Any, batch: Any) -> dict[str, Any]:
        assert model(batch).is_meta
        return {"items": (1, 1)}

    assert evaluate(nn.Linear(2, 2, device="meta"), [torch.zeros(3, 2)], metrics) == {"items": 1.0}


def classifier() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Linear(4, 3), torch.randn(20, 4), torch.randint(0, 3, (20,))


def test_evaluating_the_training_data_leaves_its_place() -> None:
    model, x, y = classifier()
    step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.0), supervised(nn.CrossEntropyLoss()))
    train = batches((x, y), 8, seed=1)
    whole = evaluate(step, batches((x, y), 8, shuffle=False))
    assert evaluate(step, train)["loss"] == pytest.approx(whole["loss"])
    assert (train.epoch, train.position) == (0, 0)
    next(iter(train))
    assert evaluate(step, train)["loss"] == pytest.approx(whole["loss"])  # not the rest of the epoch
    assert (train.epoch, train.position) == (0, 8)
    rows = Rows([*zip(x, y, strict=True)])
    stream = batches(rows, 8)
    assert evaluate(step, stream)["loss"] == pytest.approx(whole["loss"])
    assert (stream.epoch, stream.position) == (0, 0)
    found = fit(step, train, epochs=3, evaluation=lambda: evaluate(step, train))
    assert (found.epochs, found.steps) == (3, 8)  # the first of 9 was handed out above


class Rows(IterableDataset[Any]):
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


def test_many_batches_of_a_16_bit_model_add_up() -> None:
    model, x, y = classifier()
    model.bfloat16()
    many = [(x.bfloat16(), y)] * 400
    metrics = supervised(nn.CrossEntropyLoss()).metrics
    one = evaluate(model, many[:1], metrics)["loss"]
    assert evaluate(model, many, metrics)["loss"] == pytest.approx(one)
    assert evaluate(model.half(), [(x.half(), y)] * 6000, lambda model, batch: {"n": (x.half().abs().sum(), 20)})


def test_a_mean_says_what_its_items_are() -> None:
    model, x, y = classifier()
    tens, one = (x[:10], y[:10]), (x[:10], torch.full((10,), -100))
    one[1][0] = 0

    def valid(model: Any, batch: Any) -> dict[str, Any]:
        losses = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return {"loss": losses[batch[1] != -100]}

    whole = evaluate(model, [tens, one], supervised(nn.CrossEntropyLoss()).metrics)
    assert evaluate(model, [tens, one], valid)["loss"] == pytest.approx(whole["loss"])
    with pytest.raises(UsageError, match="the figure 'loss' is of -3 items; a pair is"):
        evaluate(model, [(x, y)], lambda model, batch: {"loss": (1.0, -3)})
    with pytest.raises(UsageError, match=r"a pair with a tensor of shape \[20\]"):
        evaluate(model, [(x, y)], lambda model, batch: {"loss": (batch[0][:, 0], 20)})


def test_the_loss_of_an_evaluation_is_checked_as_that_of_a_step() -> None:
    model, x, _ = classifier()
    with pytest.raises(UsageError, match="compares them element by element"):
        evaluate(nn.Linear(4, 1), [(x, torch.zeros(20))], supervised(nn.MSELoss()).metrics)
    with pytest.raises(UsageError, match="a target is class 7"):
        evaluate(model, [(x, torch.full((20,), 7))], supervised(nn.CrossEntropyLoss()).metrics)


@pytest.mark.parametrize(
    "criterion",
    [
        nn.functional.cross_entropy,
        functools.partial(nn.functional.cross_entropy, ignore_index=-100),
        functools.partial(nn.functional.cross_entropy, label_smoothing=0.1),
        functools.partial(nn.CrossEntropyLoss(label_smoothing=0.1)),
    ],
)
def test_functions_of_torch_leave_out_what_its_modules_do(criterion: Any) -> None:
    model, x, y = classifier()
    y[::3] = -100
    parts = [(x[:5], y[:5]), (x[5:], y[5:])]
    with torch.no_grad():
        expected = criterion(model(x), y)
    assert evaluate(model, parts, supervised(criterion).metrics)["loss"] == pytest.approx(float(expected), rel=1e-5)
    assert supervised(functools.partial(nn.functional.cross_entropy, reduction="sum")).count_terms((x, y)) is None
    with pytest.raises(UsageError, match="reduction is 'none'"):
        supervised(functools.partial(nn.functional.cross_entropy, reduction="none"))


def test_classes_that_may_be_either_dimension_are_refused() -> None:
    x, y = torch.randn(2, 5, 5), torch.randint(0, 5, (2, 5))
    with pytest.raises(UsageError, match=r"the model returns \[2, 5, 5\], and the targets are \[2, 5\]"):
        supervised(nn.CrossEntropyLoss())(nn.Identity(), (x, y))
    assert supervised(nn.CrossEntropyLoss())(nn.Identity(), (torch.randn(2, 5, 4), y % 4)).ndim == 0
