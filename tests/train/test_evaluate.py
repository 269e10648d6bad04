"""Evaluation: exact over ragged batches, and the model afterwards as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from flatout.errors import UsageError
from flatout.plan import Plan
from flatout.train.evaluate import evaluate
from flatout.train.loss import supervised


def test_the_mean_is_over_items_not_over_batches() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 4))
    x, y = torch.randn(41, 6), torch.randint(0, 4, (41,))
    y[::5] = -100
    parts = [(x[i : i + 16], y[i : i + 16]) for i in range(0, 41, 16)]
    figures = evaluate(model, parts, supervised(nn.CrossEntropyLoss()).measure)
    with torch.no_grad():
        scores = model.eval()(x)
    assert figures["loss"] == pytest.approx(float(nn.functional.cross_entropy(scores, y)), rel=1e-5)
    assert figures["accuracy"] == pytest.approx(float((scores.argmax(1) == y)[y >= 0].float().mean()))
    reduced = evaluate(model, parts, supervised(nn.CrossEntropyLoss()).measure, Plan(precision="bf16"))
    assert 0 < abs(reduced["loss"] - figures["loss"]) < 0.05


def test_modes_are_put_back_after_an_error_too() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5), nn.BatchNorm1d(3))
    model[0].eval()

    def measure(model: Any, batch: Any) -> Any:
        assert not any(module.training for module in model.modules())
        assert torch.is_inference_mode_enabled()
        if len(batch) == 1:
            raise ValueError("mine")
        return {"items": torch.ones(len(batch))}

    assert evaluate(model, [torch.zeros(4, 3)], measure) == {"items": 1.0}
    with pytest.raises(ValueError, match="mine"):
        evaluate(model, [torch.zeros(1, 3)], measure)
    assert [module.training for module in model.modules()] == [True, False, True, True]


def test_bad_input_is_named() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match="nothing to evaluate"):
        evaluate(model, [], lambda model, batch: {})
    with pytest.raises(UsageError, match="measure returned Tensor"):
        evaluate(model, [torch.zeros(1, 2)], lambda model, batch: model(batch))  # type: ignore[arg-type, return-value]
