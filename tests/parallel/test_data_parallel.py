"""parallel = 'dp' where there are no several GPUs; with them: tests/gpu/test_data_parallel.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import flatout
from flatout import Plan, TrainStep
from flatout.errors import FlatoutError, PlanError
from flatout.parallel import parallelize

LOSS = flatout.supervised(nn.CrossEntropyLoss())
BATCH = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 3


def step_under(plan: Plan) -> TrainStep:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    return TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), LOSS, plan)


def test_it_changes_nothing_on_a_cpu() -> None:
    alone, spread = step_under(Plan()), step_under(Plan(parallel="dp"))
    assert [alone(BATCH).item() for _ in range(3)] == [spread(BATCH).item() for _ in range(3)]


def test_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    second = flatout.Ranks(rank=1, count=2, local_rank=1, device=torch.device("cpu"))
    monkeypatch.setattr(parallelize, "ranks", lambda: second)
    with pytest.raises(PlanError, match=r"parallel is 'dp', and this is one of 2 ranks; .* set parallel = 'ddp'"):
        step_under(Plan(parallel="dp"))


@pytest.mark.parametrize("choices", [{"compile": "default"}, {"activation_checkpointing": "block"}])
def test_what_acts_on_the_model_is_refused(choices: dict[str, str]) -> None:
    with pytest.raises(PlanError, match="while parallel is 'dp'; it acts on the model itself"):
        Plan(parallel="dp", **choices)  # type: ignore[arg-type]


def test_it_is_not_forecast() -> None:
    with pytest.raises(FlatoutError, match=r"parallel is 'dp'; .* not forecast"):
        flatout.forecast(step_under(Plan(parallel="dp")), BATCH)
