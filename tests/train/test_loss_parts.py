"""A batch in parts: a part without terms adds nothing, figures beside the loss are the batch's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from flatout.errors import UsageError
from flatout.models import GPT2, GPT2Config
from flatout.plan import Plan
from flatout.train.evaluate import evaluate
from flatout.train.loss import LanguageModelLoss, supervised
from flatout.train.loss_parts import check_loss
from flatout.train.step import TrainStep

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
Y = X.argmax(1) % 3
HALF = torch.where(torch.arange(8) < 4, -100, Y)
CRITERION = supervised(nn.CrossEntropyLoss())


class Masked:
    """A mean over the valid items as people write it: its gradient is NaN where there are none."""

    def __call__(self, model: Any, batch: Any) -> Any:
        valid = (batch[1] >= 0).float()
        losses = nn.functional.cross_entropy(model(batch[0]), batch[1].clamp(0), reduction="none")
        return (losses * valid).sum() / valid.sum()

    def count_terms(self, batch: Any) -> Any:
        return (batch[1] >= 0).sum()


def stepped(parts: int, y: torch.Tensor, loss_fn: Any = CRITERION) -> tuple[float, torch.Tensor, TrainStep]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn, Plan(micro_batches=parts))
    return float(step((X, y))), model.weight.detach(), step


@pytest.mark.parametrize("loss_fn", [CRITERION, Masked()], ids=["supervised", "masked mean"])
@pytest.mark.parametrize("order", [[0, 1], [1, 0]], ids=["first", "last"])
def test_a_part_without_targets_adds_nothing(loss_fn: Any, order: list[int]) -> None:
    y = torch.cat([HALF[4 * i : 4 * i + 4] for i in order])
    whole, parts = stepped(1, y, loss_fn), stepped(2, y, loss_fn)
    assert parts[0] == pytest.approx(whole[0])
    torch.testing.assert_close(parts[1], whole[1])


@pytest.mark.parametrize("y", [HALF, HALF.flip(0)], ids=["first", "last"])
def test_the_same_without_reading_the_weights(y: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where nothing is to wait for them."""
    monkeypatch.setattr("flatout.train.loss_parts.on_host", lambda value: False)
    whole, parts = stepped(1, y), stepped(2, y)
    assert parts[0] == pytest.approx(whole[0])
    torch.testing.assert_close(parts[1], whole[1])
    _, weight, step = stepped(2, torch.full((8,), -100))
    with pytest.warns(UserWarning, match="is nan"):
        step.finish()
    assert step.nonfinite_losses == 1
    assert weight.isfinite().all()


def test_a_batch_without_any_has_torchs_own_answer() -> None:
    before = torch.manual_seed(0) and nn.Linear(4, 3).weight
    for parts in (1, 2):
        loss, weight, step = stepped(parts, torch.full((8,), -100))
        assert loss != loss
        assert torch.equal(weight, before)
        with pytest.warns(UserWarning, match="the loss of step 1 is nan"):
            step.finish()


def test_a_language_models_half_without_targets() -> None:
    still = {"dropout": 0.0, "embedding_dropout": 0.0, "attention_dropout": 0.0}
    model = GPT2(GPT2Config(vocab_size=11, max_tokens=8, width=8, heads=1, layers=1, **still))
    tokens = torch.randint(0, 11, (4, 8))
    targets = tokens.clone()
    targets[2:] = -100
    expected = float(LanguageModelLoss()(model, (tokens, targets)).detach())
    step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), LanguageModelLoss(), Plan(micro_batches=2))
    assert float(step((tokens, targets))) == pytest.approx(expected)
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_an_evaluated_batch_without_targets_counts_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    parts = [(X[:4], HALF[:4]), (X[4:], HALF[4:])]
    figures = evaluate(model, parts, CRITERION.metrics)
    alone = evaluate(model, parts[1:], CRITERION.metrics)
    assert figures == pytest.approx(alone)
    assert evaluate(model, parts[:1], CRITERION.metrics)["loss"] != figures["loss"]  # NaN


@pytest.mark.parametrize("parts", [1, 3])
def test_figures_beside_the_loss_are_means_over_the_batch(parts: int) -> None:
    def with_figures(model: Any, batch: Any) -> Any:
        return CRITERION(model, batch), {"largest": batch[0].mean(), "one": 1.0}

    _, _, step = stepped(parts, Y, with_figures)
    assert float(step.figures["largest"]) == pytest.approx(float(X.mean()), abs=1e-6)
    assert float(step.figures["one"]) == pytest.approx(1.0)
    assert not step.figures["largest"].requires_grad
    step.loss_fn = CRITERION
    step((X, Y))
    assert step.figures == {}


def test_figures_of_a_summed_loss_are_weighed_by_samples() -> None:
    summed = supervised(nn.CrossEntropyLoss(reduction="sum"))

    def with_figures(model: Any, batch: Any) -> Any:
        return summed(model, batch), {"mean": batch[0].mean()}

    with_figures.count_terms = summed.count_terms  # type: ignore[attr-defined]
    assert float(stepped(3, Y, with_figures)[2].figures["mean"]) == pytest.approx(float(X.mean()), abs=1e-6)


def test_a_figure_that_is_no_scalar_is_refused() -> None:
    told = r"a Tensor of shape \[8\] as the figure 'x'; .*take its mean"
    with pytest.raises(UsageError, match=told):
        stepped(1, Y, lambda model, batch: (model(batch[0]).mean(), {"x": torch.zeros(8)}))
    with pytest.raises(UsageError, match="loss_fn returned tuple"):
        stepped(1, Y, lambda model, batch: (model(batch[0]).mean(), 1.0))


@pytest.mark.parametrize("own", [2.0, [1.0, 2.0, 1.0], torch.tensor(2.0)])
def test_a_criterion_whose_weight_is_not_one_of_classes(own: object) -> None:
    class Focal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.ignore_index = own, -100

        def forward(self, scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(scores, targets)

    losses = []
    for parts in (1, 2):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        step = TrainStep(model, optimizer, supervised(Focal()), Plan(micro_batches=parts))
        losses.append(float(step((X, torch.where(torch.arange(8) < 3, -100, Y)))))
    assert losses[1] == pytest.approx(losses[0])


def test_an_output_with_a_loss_is_told_to_return_that() -> None:
    with pytest.raises(UsageError, match=r"returned SimpleNamespace; .*; return its \.loss"):
        check_loss(SimpleNamespace(loss=torch.ones(())))
