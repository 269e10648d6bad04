"""Several steps whose plans ask for the chunked loss: each acts on its own model's scores."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import flatout
from flatout import Plan, TrainStep
from flatout.levers import chunked_loss
from flatout.levers.activation_offload import offloading_to
from flatout.levers.lazy_scores import LazyScores
from tests.levers.test_activation_offload import StandIn

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


class WithLoss(nn.Module):
    """A model that returns its loss, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.head = nn.Linear(64, 64), nn.Linear(64, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.inner(x).tanh()), y)


def test_a_model_that_computes_its_loss_may_offload_its_activations() -> None:
    batch = torch.randn(512, 64), torch.randint(0, CLASSES, (512,))
    trained = []
    for plan in (Plan(), Plan(loss="chunked", activation_offload=True)):
        model = WithLoss()
        with offloading_to(StandIn()) as host:
            step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), lambda model, batch: model(*batch), plan)
            for _ in range(3):
                step(batch)
        assert step.rolled_back == []
        assert bool(host.moved_bytes) == bool(plan.activation_offload)
        trained.append([one.detach() for one in model.parameters()])
        assert flatout.forecast(step, batch, device="rtx-4090").method == "fake run"
        step.close()
    torch.testing.assert_close(*trained)
