"""A forecast for one of several ranks that are not there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed, nn

import flatout
from flatout.errors import UsageError
from flatout.memory.forecast import MemoryForecast

PARAMETERS = 64 * 64 + 64 + 2 * (64 * 64 + 64) + 64 * 8 + 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(64, 64), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


def step_of(parallel: str | None, **options: Any) -> flatout.TrainStep:
    model = nn.Sequential(nn.Linear(64, 64), Block(), Block(), nn.Linear(64, 8))
    plan = flatout.Plan() if parallel is None else flatout.Plan(**{"parallel": parallel, **options})
    loss = flatout.supervised(nn.CrossEntropyLoss())
    return flatout.TrainStep(model, torch.optim.AdamW(model.parameters()), loss, plan)


BATCH = torch.zeros(16, 64), torch.zeros(16, dtype=torch.int64)


def forecast_of(parallel: str, ranks: int, **options: Any) -> MemoryForecast:
    return flatout.forecast(step_of(parallel, **options), BATCH, ranks=ranks)


def test_what_each_strategy_leaves_to_a_rank() -> None:
    found = {kind: forecast_of(kind, 4) for kind in ("ddp", "zero1", "fsdp")}
    held = {kind: one.categories["weights"] for kind, one in found.items()}
    assert held["ddp"] == held["zero1"] == 4 * PARAMETERS
    assert held["fsdp"] == pytest.approx(4 * PARAMETERS / 4, rel=0.01)  # FSDP pads what does not divide
    state = {kind: one.categories["optimizer"] for kind, one in found.items()}
    assert state["ddp"] == pytest.approx(8 * PARAMETERS, rel=0.01)  # and a counter for each parameter
    assert 8 * PARAMETERS // 4 <= state["zero1"] <= state["ddp"] // 2
    assert state["fsdp"] == pytest.approx(8 * PARAMETERS / 4, rel=0.02)
    assert found["fsdp"].peak_bytes < found["zero1"].peak_bytes < found["ddp"].peak_bytes
    assert {one.batch_size for one in found.values()} == {4}
    assert str(found["fsdp"]).startswith("batch 4 on cpu, rank 0 of 4: peak ")
    assert not distributed.is_initialized()


def test_more_ranks_hold_less_each() -> None:
    assert forecast_of("fsdp", 8).peak_bytes < forecast_of("fsdp", 2).peak_bytes


def test_options_of_fsdp_change_what_a_rank_holds() -> None:
    plain = forecast_of("fsdp", 4).peak_bytes
    assert forecast_of("fsdp", 4, fsdp_keep_gathered=True).peak_bytes > plain
    assert forecast_of("fsdp", 4, fsdp_dtype="bf16").peak_bytes < plain
    alone = flatout.forecast(step_of("fsdp", fsdp_dtype="bf16"), BATCH)  # without ranks nothing is sharded
    assert alone.peak_bytes == flatout.forecast(step_of(None), BATCH).peak_bytes


@pytest.mark.parametrize(
    ("parallel", "ranks", "said"),
    [
        (None, 2, "ranks is 2 and the plan's parallel is None; a forecast of ranks is for 'ddp'"),
        ("fsdp", 17, "the batch has 16 samples for 17 ranks"),
        ("fsdp", 0, "ranks is 0"),
    ],
)
def test_what_cannot_be_forecast(parallel: str | None, ranks: int, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        flatout.forecast(step_of(parallel), BATCH, ranks=ranks)
