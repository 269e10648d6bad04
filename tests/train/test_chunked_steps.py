"""Several steps whose plans ask for the chunked loss: each acts on its own model's scores."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from flatout import Plan, TrainStep
from flatout.levers import chunked_loss
from flatout.levers.lazy_scores import LazyScores

CLASSES = 17


@pytest.fixture(autouse=True)
def _small_is_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_loss, "LEAST_CLASSES", CLASSES)
    monkeypatch.setattr(chunked_loss, "LEAST_SCORES_BYTES", 0)


def plain(model: Any, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def with_temperature(model: Any, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]) / 0.7, batch[1])


def test_each_step_has_its_own_models_scores() -> None:
    """The levers of several steps are on at once; what one learns of its model's layers is not told to another."""
    torch.manual_seed(0)
    batch = torch.randn(8, 6), torch.randint(0, CLASSES, (8,))
    models = [nn.Linear(6, CLASSES) for _ in range(2)]
    steps = [
        TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), loss, Plan(loss="chunked"))
        for model, loss in zip(models, (with_temperature, plain), strict=True)
    ]
    for _ in range(3):
        for step in steps:
            step(batch)
    assert "are used by" in steps[0].rolled_back[0][1]
    assert steps[1].rolled_back == []
    assert type(nn.Linear(6, CLASSES)(batch[0])) is Tensor  # nobody's plan says anything of this one
    assert type(models[1](batch[0])) is LazyScores
    for step in steps:
        step.close()
    assert functional.linear is torch._C._nn.linear
