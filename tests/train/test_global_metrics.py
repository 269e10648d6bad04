"""Metrics over all outputs: exact whatever the batches, from functions and from objects as torchmetrics has them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from sklearn.metrics import f1_score, roc_auc_score
from torch import nn

from flatout.errors import UsageError
from flatout.plan import Plan
from flatout.train.evaluate import evaluate
from flatout.train.global_metrics import over_all
from flatout.train.loss import supervised
from flatout.train.step import TrainStep

X = torch.randn(41, 6, generator=torch.Generator().manual_seed(1))
Y = (X[:, :2] + 0.5 * X[:, 2:4]).argmax(1)


def model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(6, 2)


def parts(size: int) -> list[Any]:
    return [(X[i : i + size], Y[i : i + size]) for i in range(0, 41, size)]


class Largest:
    """As torchmetrics': it keeps what it needs of each batch."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.value = -math.inf

    def update(self, scores: torch.Tensor, targets: torch.Tensor) -> None:
        self.value = max(self.value, float(scores.max()))

    def compute(self) -> torch.Tensor:
        return torch.tensor(self.value)


@pytest.mark.parametrize("size", [41, 16, 1])
def test_functions_and_objects_over_ragged_batches(size: int) -> None:
    largest, network = Largest(), model()

    def metrics(model: Any, batch: Any) -> dict[str, Any]:
        scores = model(batch[0])
        return {
            "auc": over_all(roc_auc_score, batch[1], scores[:, 1] - scores[:, 0]),
            "f1": over_all(f1_score, batch[1], scores.argmax(1)),
            "largest": over_all(largest, scores, batch[1]),
            "texts": over_all(len, [str(int(one)) for one in batch[1]]),
            "both": over_all(lambda rows: {"low": rows.min(), "high": rows.max()}, scores),
            "right": scores.argmax(1) == batch[1],
        }

    with torch.no_grad():
        scores = network(X)
    found = evaluate(network, parts(size), metrics)
    assert found == pytest.approx(
        {
            "auc": roc_auc_score(Y, scores[:, 1] - scores[:, 0]),
            "f1": f1_score(Y, scores.argmax(1)),
            "largest": float(scores.max()),
            "texts": 41,
            "both_low": float(scores.min()),
            "both_high": float(scores.max()),
            "right": float((scores.argmax(1) == Y).float().mean()),
        }
    )
    largest.value = 1e9  # of an evaluation that failed
    assert evaluate(network, parts(size), metrics)["largest"] == found["largest"]


def test_a_supervised_loss_has_its_own() -> None:
    loss_fn = supervised(
        nn.CrossEntropyLoss(),
        metrics={"f1": lambda scores, targets: f1_score(targets, scores.argmax(1)), "top": Largest()},
    )
    network, y = model(), Y.clone()
    y[::5] = -100
    step = TrainStep(network, torch.optim.SGD(network.parameters(), 0.1), loss_fn)
    found = evaluate(step, [(X[:30], y[:30]), (X[30:], y[30:])])
    with torch.no_grad():
        scores = network(X)
    assert set(found) == {"loss", "accuracy", "f1", "top"}
    assert found["f1"] == pytest.approx(f1_score(Y[y >= 0], scores.argmax(1)[y >= 0]))


def test_sixteen_bits_come_as_32_and_nothing_is_nan() -> None:
    seen: list[torch.dtype] = []

    def note(rows: torch.Tensor) -> float:
        seen.append(rows.dtype)
        return 1.0

    figures = {"a": lambda rows: over_all(note, rows)}
    evaluate(model(), [X], lambda model, batch: {"a": figures["a"](batch.bfloat16())})
    assert seen == [torch.float32]
    found = evaluate(model(), [X], lambda model, batch: {"a": figures["a"](batch[:0])})
    assert math.isnan(found["a"])
    assert len(seen) == 1


def test_what_cannot_be_is_refused() -> None:
    def given(value: Any) -> Any:
        return evaluate(model(), [X[:3], X[3:5]], lambda model, batch: {"a": value(batch)})

    with pytest.raises(UsageError, match=r"metric is the class Largest; .*over_all\("):
        given(lambda batch: over_all(Largest, batch))
    with pytest.raises(UsageError, match="metric of the figure 'a' is a different object in each batch"):
        given(lambda batch: over_all(Largest(), batch, batch))
    same = len
    with pytest.raises(UsageError, match=r"rows of the figure 'a' are \[2\], \[3\]"):
        given(lambda batch: over_all(same, batch.T))
    with pytest.raises(UsageError, match="given a ndarray for the figure 'a'"):
        given(lambda batch: over_all(same, batch.numpy()))
    with pytest.raises(UsageError, match=r"the figure 'a' returned a Tensor of shape \[6\]; it returns one number"):
        given(lambda batch: over_all(lambda rows: rows[0], batch))
    with pytest.raises(UsageError, match="metrics is a list; it maps names"):
        supervised(nn.CrossEntropyLoss(), metrics=["f1"])  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError) as caught:
        given(lambda batch: over_all(lambda rows: 1 / 0, batch))
    assert caught.value.__notes__ == ["while computing the figure 'a' over all batches"]


def test_a_step_brings_model_metrics_and_precision() -> None:
    def plain(model: Any, batch: Any) -> Any:
        return nn.functional.cross_entropy(model(batch[0]), batch[1]), {"mean": batch[0].mean()}

    network = model()
    step = TrainStep(network, torch.optim.SGD(network.parameters(), 0.1), plain, Plan(precision="bf16"))
    found = evaluate(step, parts(16))
    assert found == pytest.approx(evaluate(step, parts(41)), rel=1e-2)
    assert found["mean"] == pytest.approx(float(X.mean()), abs=1e-6)
    exact = evaluate(network, parts(16), step.metrics)
    assert 0 < abs(found["loss"] - exact["loss"]) < 0.05
    assert found == evaluate(network, parts(16), step.metrics, plan=step.plan)
    assert evaluate(step, parts(16), lambda model, batch: {"n": torch.ones(3)}) == {"n": 1.0}
    with pytest.raises(UsageError, match="plan is given with a TrainStep"):
        evaluate(step, parts(16), plan=Plan())
    with pytest.raises(UsageError, match="metrics is None; a model alone does not say"):
        evaluate(network, parts(16))
    weighted = TrainStep(
        network, torch.optim.SGD(network.parameters(), 0.1), plain, count_terms=lambda batch: len(batch[0]) // 41
    )
    found = evaluate(weighted, [*parts(41), (X[:5] + 9, Y[:5])])
    assert found["loss"] == pytest.approx(evaluate(network, parts(41), step.metrics)["loss"])


def test_two_figures_of_one_name_are_refused() -> None:
    def metrics(model: Any, batch: Any) -> dict[str, Any]:
        return {"f_x": torch.ones(4), "f": over_all(lambda rows: {"x": 1.0}, batch)}

    with pytest.raises(UsageError, match="two figures are named 'f_x'; one is of 'f', computed over all items"):
        evaluate(torch.nn.Linear(1, 1), [torch.ones(4, 1)], metrics)
