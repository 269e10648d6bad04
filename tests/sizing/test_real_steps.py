"""Where the data decide, small real steps are extended: the stated error covers what was then measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from flatout import Plan, forecast, predict, supervised
from flatout.errors import UsageError
from flatout.memory.real_run import LimitedRun
from flatout.sizing.real_steps import _with_unseen
from flatout.train.step import TrainStep

LOSS = supervised(nn.CrossEntropyLoss())


class Chosen(nn.Module):
    """Only the rows that score above a bar go through the wide part: how many is a matter of the data."""

    def __init__(self, bar: float) -> None:
        super().__init__()
        self.bar, self.wide, self.head = (
            bar,
            nn.Sequential(nn.Linear(32, 512), nn.GELU(), nn.Linear(512, 32)),
            nn.Linear(32, 5),
        )

    def forward(self, x: Any) -> Any:
        rows = (x.mean(1) * 32**0.5 > self.bar).nonzero()[:, 0]
        return self.head(x.index_add(0, rows, self.wide(x[rows])))


class Pairs(nn.Module):
    """Each sample against each other one: the batch's square."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(32, 64), nn.Linear(64, 5)

    def forward(self, x: Any) -> Any:
        hidden = self.first(x).relu()
        if hidden.sum() < 0:
            hidden = hidden * 2
        near = (hidden[:, None] - hidden[None]).square().sum(-1).neg().softmax(-1)
        return self.head(near @ hidden)


def data(samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    return torch.randn(samples, 32), torch.randint(0, 5, (samples,))


def measured(model: nn.Module, batch: Any) -> int:
    step, run = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), LOSS), LimitedRun("cpu", 1 << 40)
    with run:
        run.hold([*model.parameters(), *batch])
        for _ in range(2):
            step(batch)
    return run.peak_bytes


@pytest.mark.parametrize(("bar", "example"), [(0.0, 12), (0.0, 32), (1.0, 32), (1.0, 96)])
def test_the_stated_error_covers_what_the_data_decide(bar: float, example: int) -> None:
    covered, low = 0, 0
    for seed in range(12):
        model = Chosen(bar)
        few = data(example, seed)
        found = forecast(TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), LOSS), few, batch_size=384)
        real = measured(model, data(384, 1000 + seed))
        assert found.method.startswith("real steps of ")
        low += real > found.peak_bytes * (1 + found.uncertainty)
        covered += abs(real / found.peak_bytes - 1) <= found.uncertainty
    assert low <= 1
    assert covered >= 11


def test_what_grows_with_the_square_is_not_promised_to_grow_in_a_line() -> None:
    model = Pairs()
    found = forecast(TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), LOSS), data(48, 0), batch_size=192)
    real = measured(model, data(192, 1))
    assert abs(real / found.peak_bytes - 1) <= found.uncertainty


def test_two_sizes_promise_less_than_three() -> None:
    model = Chosen(-100.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    two, three = (forecast(TrainStep(model, optimizer, LOSS), data(samples, 0)) for samples in (2, 3))
    assert (two.method, three.method) == (
        "real steps of 1 and 2 samples, extrapolated",
        "real steps of 1 and 2 and 3 samples, extrapolated",
    )
    assert two.uncertainty == 0.3
    assert three.uncertainty == 0.15
    with pytest.raises(UsageError, match="at least 2 samples"):
        forecast(TrainStep(model, optimizer, LOSS), data(1, 0))


def test_copies_keep_recurrent_weights_in_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN copied them together in every call, and torch warned. On the CPU only the asking can be seen."""
    model = Recurrent()
    asked = []
    monkeypatch.setattr(nn.LSTM, "flatten_parameters", lambda self: asked.append(self))
    batch = torch.randn(12, 6, 8), torch.randint(0, 5, (12,))
    forecast(TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), LOSS), batch)
    predict(model, batch[0], Plan(precision="bf16"))
    assert {id(one) for one in asked} - {id(model.lstm)}
    assert len({id(one) for one in asked} - {id(model.lstm)}) >= 2


@pytest.mark.parametrize(
    ("unseen", "extra"), [([0, 0, 0], 0), ([10, 20, 30], 60), ([30, 30, 30], 30), ([30, 20, 10], 30)]
)
def test_what_a_library_takes_for_itself_is_extended(unseen: list[int], extra: int) -> None:
    """On CUDA it is what the allocator held beyond the tensors that were seen."""
    model = nn.Linear(32, 5)
    batch = torch.randn(8, 32), torch.randint(0, 5, (8,))
    made = forecast(TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), LOSS), batch)
    found = _with_unseen(made, unseen, [1, 2, 3], 6)
    assert found.tensor_bytes - made.tensor_bytes == found.peak_bytes - made.peak_bytes == extra
    assert found.tensor_bytes == sum(found.categories.values())


class Recurrent(nn.Module):
    """Of as many rows as the data decide."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 5)

    def forward(self, x: Any) -> Any:
        scores = self.head(self.lstm(x)[0][:, -1])
        return scores * 2 if scores.sum() > 1e9 else scores


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)

    def forward(self, x: Any) -> Any:
        hidden = self.norm(self.first(x))
        return self.last(hidden if hidden.sum().item() < 1e9 else hidden * 2)


def test_batch_norm_gets_more_than_one_sample() -> None:
    model = Norm()
    step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), supervised(nn.CrossEntropyLoss()))
    batch = (torch.randn(8, 8), torch.arange(8) % 4)
    assert forecast(step, batch).method == "real steps of 2 and 4 and 6 samples, extrapolated"
    with pytest.raises(UsageError, match=r"real steps of 2 and 4 samples would be measured, .* has 3 samples"):
        forecast(step, (batch[0][:3], batch[1][:3]))


class Keeps(Norm):
    def forward(self, x: Any) -> Any:
        self.kept = super().forward(x)
        return self.kept


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    model = Keeps()
    step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), supervised(nn.CrossEntropyLoss()))
    batch = (torch.randn(8, 8), torch.arange(8) % 4)
    step(batch)
    with pytest.raises(UsageError, match="the model cannot be copied"):
        forecast(step, batch)
