"""Forecasts of compiled models: graphs cut as torch.compile cuts them, chains of small operations held nowhere."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import flatout
from flatout.memory import compiled_run
from flatout.plan import Plan
from flatout.sizing.forecasting import LARGE_SEGMENT_BYTES
from flatout.train.step import TrainStep
from tests.allocator_record import allocator_recorded, window

LOSS = flatout.supervised(nn.CrossEntropyLoss())
MISS = 0.05 if tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13) else 0.08
"""The rules were made with torch 2.13; 2.11 fuses one pair of operations otherwise."""
COMPILED = Plan(compile="default")


class Block(nn.Module):
    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Any) -> Any:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)), approximate="tanh") * 1.5 + 0.1))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(96, 10)

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def training() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = Model()
    batch = torch.randn(16, 24, 96), torch.randint(0, 10, (16,))
    return model, torch.optim.SGD(model.parameters(), 0.1), batch


def measured(plan: Plan) -> int:
    """What torch's own record says of two steps, after one that compiles."""
    model, optimizer, batch = training()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = TrainStep(model, optimizer, LOSS, plan)
        first(batch)
        first.close()
        with allocator_recorded() as peak_in_window:
            model, optimizer, batch = training()
            step = TrainStep(model, optimizer, LOSS, plan)
            with window():
                step(batch)
                step(batch)
    return peak_in_window()


@pytest.mark.parametrize(
    ("plan", "miss"),
    [
        pytest.param(COMPILED, MISS, marks=pytest.mark.slow),
        (Plan(compile="regional", precision="bf16"), 0.15),
    ],
)
@pytest.mark.slow
def test_the_allocator_agrees(plan: Plan, miss: float) -> None:
    model, optimizer, batch = training()
    made = flatout.forecast(TrainStep(model, optimizer, LOSS, plan), batch)
    real = measured(plan)
    assert made.method == "fake run"
    assert made.uncertainty == 0.15
    assert made.peak_bytes == pytest.approx(real, rel=miss)
    assert any("what the compiler fuses otherwise" in line for line in made.not_covered)


def test_a_chain_of_small_operations_is_held_nowhere() -> None:
    """Only the product's result and the mask are kept of it; uncompiled, each link that autograd needs is."""

    class Chain(nn.Linear):
        def forward(self, x: Any) -> Any:
            out = super().forward(x).tanh().exp() * 2
            return nn.functional.dropout((out.sin() + 1).sigmoid().square(), 0.1)

    model = Chain(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batch = torch.randn(2048, 64), torch.randint(0, 64, (2048,))
    compiled, plainly = (
        flatout.forecast(TrainStep(model, optimizer, LOSS, plan), batch) for plan in (COMPILED, Plan())
    )
    one = 2048 * 64 * 4
    assert plainly.peak_bytes - compiled.peak_bytes > 3 * one


def test_nothing_of_the_users_is_changed() -> None:
    model, optimizer, batch = training()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    flatout.forecast(TrainStep(model, optimizer, LOSS, COMPILED), batch)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(one.grad is None for one in model.parameters())
    assert all(one._compiled_call_impl is None for one in model.modules())
    assert not torch.compiler.is_compiling()


def test_buffers_shared_weights_and_other_batch_sizes() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.second = nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Linear(32, 32)
            self.second.weight = self.first.weight

        def forward(self, x: Any) -> Any:
            return self.second(self.norm(self.first(x)).relu())

    model = Normed()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(8, 32), torch.randint(0, 32, (8,))
    small, large = (
        flatout.forecast(TrainStep(model, optimizer, LOSS, COMPILED), batch, batch_size=size) for size in (8, 512)
    )
    assert small.uncertainty == large.uncertainty == 0.15
    assert small.categories["weights"] == large.categories["weights"]
    assert large.peak_bytes > small.peak_bytes
    assert (
        flatout.forecast(TrainStep(model, optimizer, LOSS, Plan(compile="default", micro_batches=3)), batch).uncertainty
        == 0.15
    )


def test_where_the_graphs_cannot_be_had_the_uncompiled_model_stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any, **words: Any) -> Any:
        raise RuntimeError("another version of torch")

    model, optimizer, batch = training()
    plainly = flatout.forecast(TrainStep(model, optimizer, LOSS), batch)
    monkeypatch.setattr(compiled_run, "aot_function", fails)
    made = flatout.forecast(TrainStep(model, optimizer, LOSS, COMPILED), batch)
    assert made.peak_bytes == plainly.peak_bytes
    assert made.uncertainty == 0.3
    assert any("of the uncompiled model" in line for line in made.not_covered)
    monkeypatch.undo()
    on_gpu = flatout.forecast(TrainStep(model, optimizer, LOSS, COMPILED), batch, device="rtx-4090")
    segment = LARGE_SEGMENT_BYTES / on_gpu.peak_bytes  # of which the allocator may hold one more
    assert on_gpu.uncertainty == pytest.approx(0.3 + segment)


def test_wide_depthwise_convolutions_are_less_certain() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.head = nn.Conv2d(16, 16, 7, padding=3, groups=16), nn.Linear(16, 5)

        def forward(self, x: Any) -> Any:
            return self.head(self.wide(x).mean((2, 3)))

    model = Wide()
    batch = torch.randn(4, 16, 12, 12), torch.randint(0, 5, (4,))
    assert (
        flatout.forecast(TrainStep(model, torch.optim.SGD(model.parameters()), LOSS, COMPILED), batch).uncertainty
        == 0.65
    )
