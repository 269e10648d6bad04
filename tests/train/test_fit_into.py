"""Measures that bring a step under a budget: the plan holds what it promises, and says so when nothing does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import flatout
from flatout.errors import MachineError, UsageError
from flatout.memory.real_run import LimitedRun
from flatout.plan import Plan
from flatout.train import fit_into as fitting
from flatout.train.fit_into import fit_into
from flatout.train.step import TrainStep

LOSS = flatout.supervised(nn.CrossEntropyLoss())


@pytest.fixture(autouse=True)
def _short_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is fastest does not matter here."""
    monkeypatch.setattr(fitting, "TIMED_SECONDS", 0.0)
    monkeypatch.setattr(fitting, "ROUNDS", 1)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = [nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True) for _ in range(2)]
        self.layers, self.head = nn.ModuleList(layer), nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(x.mean(1))
        return out


def training() -> tuple[nn.Module, torch.optim.Optimizer, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    model = Encoder()
    return model, torch.optim.AdamW(model.parameters()), (torch.randn(8, 16, 32), torch.randint(0, 5, (8,)))


def peak(plan: Plan) -> int:
    model, optimizer, batch = training()
    step, run = TrainStep(model, optimizer, LOSS, plan), LimitedRun("cpu", 1 << 40)
    with run:
        run.hold([*model.parameters(), *batch])
        for _ in range(2):
            step(batch)
    return run.peak_bytes


@pytest.mark.parametrize("share", [0.85, 0.5])
def test_the_plan_stays_under_the_budget(share: float) -> None:
    model, optimizer, batch = training()
    before = [one.clone() for one in model.parameters()]
    budget = int(share * peak(Plan()))
    found = fit_into(budget, model, optimizer, LOSS, batch, progress=lambda line: None)
    assert found.plan.choices()
    assert peak(found.plan) <= budget
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    assert not optimizer.state
    assert "chosen" in str(found)
    assert "real steps" in found.timed_by
    fastest = min((one for one in found.considered if one.step_seconds), key=lambda one: one.step_seconds or 0)
    assert fastest.choices == found.plan.choices()


def test_no_precision_is_lost_where_none_may_be() -> None:
    model, optimizer, batch = training()
    budget = int(0.6 * peak(Plan()))
    found = fit_into(budget, model, optimizer, LOSS, batch, exactness="rounding", progress=lambda line: None)
    assert found.plan.precision is None


def test_another_gpu_is_timed_by_operations() -> None:
    model, optimizer, batch = training()
    given = flatout.forecast(model, optimizer, LOSS, batch, device="rtx-4090", batch_size=512)
    found = fit_into(
        given.peak_bytes * 2 // 3,
        model,
        optimizer,
        LOSS,
        batch,
        Plan(accumulate=1),
        device="rtx-4090",
        batch_size=512,
        progress=lambda line: None,
    )
    assert found.forecast.device == "rtx-4090"
    assert found.forecast.peak_bytes <= found.budget_bytes
    assert found.timed_by == "operations counted in a fake run"


def test_what_fits_is_left_as_it_is() -> None:
    model, optimizer, batch = training()
    assert fit_into("1 GiB", model, optimizer, LOSS, batch).plan == Plan()


def test_bad_budgets() -> None:
    model, optimizer, batch = training()
    with pytest.raises(UsageError, match="weights and the optimizer's state alone"):
        fit_into(100_000, model, optimizer, LOSS, batch, progress=lambda line: None)
    with pytest.raises(UsageError, match="budget is 0"):
        fit_into(0, model, optimizer, LOSS, batch)
    least = 230_000
    with pytest.raises(MachineError, match="is the least"):
        fit_into(least, model, optimizer, LOSS, batch, progress=lambda line: None)


def test_a_measure_that_the_model_does_not_bear_is_left_out() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Linear(64, 5))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(16, 32), torch.randint(0, 5, (16,))
    told: list[str] = []
    given = flatout.forecast(model, optimizer, LOSS, batch).peak_bytes
    found = fit_into(given - 1, model, optimizer, LOSS, batch, progress=told.append)  # parts of 1 sample: no variance
    assert found.forecast.peak_bytes < given
    assert any(line.startswith("left out accumulate=16: ValueError") for line in told)


@pytest.mark.parametrize("words", [{"exactness": "exact"}, {"batch_size": 0}, {"batch_size": "8"}, {"device": 3}])
def test_options_that_mean_nothing_are_refused_though_everything_fits(words: dict[str, Any]) -> None:
    model, optimizer, batch = training()
    with pytest.raises(UsageError):
        fit_into("1 GiB", model, optimizer, LOSS, batch, **words)
