"""Measures that bring a step under a budget: the plan holds what it promises, and says so when nothing does."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import nn

import flatout
from flatout.errors import MachineError, UsageError
from flatout.memory.fake_run import is_fake
from flatout.memory.real_run import LimitedRun
from flatout.plan import Plan
from flatout.sizing import fit_to_memory as fitting
from flatout.sizing.fit_to_memory import fit_to_memory
from flatout.sizing.measures import Choices, exactness_of
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
    return model, torch.optim.AdamW(model.parameters()), (torch.randn(4, 16, 32), torch.randint(0, 5, (4,)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop, self.outer = nn.Linear(32, 64), nn.Dropout(0.1), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.outer(self.drop(torch.relu(self.inner(x))))
        return out


def plain_training() -> tuple[nn.Module, torch.optim.Optimizer, tuple[torch.Tensor, torch.Tensor]]:
    """Blocks of few operations: a fake run's time is that of its operations, whatever their size."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Flatten(), nn.Linear(16 * 32, 5))
    return model, torch.optim.AdamW(model.parameters()), (torch.randn(8, 16, 32), torch.randint(0, 5, (8,)))


def peak(plan: Plan, make: Any = training) -> int:
    model, optimizer, batch = make()
    step, run = TrainStep(model, optimizer, LOSS, plan), LimitedRun("cpu", 1 << 40)
    with run:
        run.hold([*model.parameters(), *batch])
        for _ in range(2):
            step(batch)
    return run.peak_bytes


@pytest.mark.parametrize(
    ("share", "make"), [(0.6, plain_training), pytest.param(0.85, training, marks=pytest.mark.slow)]
)
@pytest.mark.slow
def test_the_plan_stays_under_the_budget(share: float, make: Any) -> None:
    model, optimizer, batch = make()
    before = [one.clone() for one in model.parameters()]
    budget = int(share * peak(Plan(), make))
    found = fit_to_memory(budget, TrainStep(model, optimizer, LOSS), batch, progress=lambda line: None)
    assert found.plan.choices()
    assert peak(found.plan, make) <= budget
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    assert not optimizer.state
    assert "chosen" in str(found)
    assert "real steps" in found.timed_by
    # a single one that fits is not timed against others
    ones = [one for one in found.considered if one.step_seconds] or [one for one in found.considered if one.fits]
    fastest = min(ones, key=lambda one: one.step_seconds or one.predicted_ratio)
    assert fastest.choices == found.plan.choices()


@pytest.mark.slow
def test_no_precision_is_lost_where_none_may_be() -> None:
    model, optimizer, batch = plain_training()
    budget = int(0.6 * peak(Plan(), plain_training))
    found = fit_to_memory(
        budget, TrainStep(model, optimizer, LOSS), batch, exactness="rounding", progress=lambda line: None
    )
    assert found.plan.precision is None


@pytest.mark.slow
def test_another_gpu_is_timed_by_operations() -> None:
    model, optimizer, batch = plain_training()
    given = flatout.forecast(TrainStep(model, optimizer, LOSS), batch, device="rtx-4090", batch_size=4096)
    found = fit_to_memory(
        given.peak_bytes * 2 // 3,
        TrainStep(model, optimizer, LOSS, Plan(micro_batches=1)),
        batch,
        device="rtx-4090",
        batch_size=4096,
        progress=lambda line: None,
    )
    assert found.forecast.device == "rtx-4090"
    assert found.forecast.peak_bytes <= found.limit_bytes
    assert found.timed_by.startswith("operations counted in a fake run; ")
    assert "a step over the link to the host at 31.5 GB/s (PCIe, TechPowerUp GPU database)" in found.timed_by


def test_what_fits_is_left_as_it_is() -> None:
    model, optimizer, batch = training()
    assert fit_to_memory("1 GiB", TrainStep(model, optimizer, LOSS), batch).plan == Plan()


def test_bad_budgets() -> None:
    model, optimizer, batch = plain_training()
    with pytest.raises(UsageError, match="weights and the optimizer's state alone"):
        fit_to_memory(100_000, TrainStep(model, optimizer, LOSS), batch, progress=lambda line: None)
    with pytest.raises(UsageError, match="limit is 0"):
        fit_to_memory(0, TrainStep(model, optimizer, LOSS), batch)
    single = nn.Linear(64, 64)  # which few measures help
    weights_bytes = 4 * (64 * 64 + 64)
    step = TrainStep(single, torch.optim.AdamW(single.parameters()), LOSS)
    with pytest.raises(MachineError, match="is the least"):
        fit_to_memory(
            3 * weights_bytes + 2000, step, (torch.randn(8, 64), torch.randint(0, 5, (8,))), progress=lambda line: None
        )


@pytest.mark.slow
def test_a_measure_that_the_model_does_not_bear_is_left_out() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Linear(64, 5))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(16, 32), torch.randint(0, 5, (16,))
    told: list[str] = []
    given = flatout.forecast(TrainStep(model, optimizer, LOSS), batch).peak_bytes
    found = fit_to_memory(
        given - 1, TrainStep(model, optimizer, LOSS), batch, progress=told.append
    )  # parts of 1 sample: no variance
    assert found.forecast.peak_bytes < given
    assert any(line.startswith("left out micro_batches=16: UsageError") for line in told)
    exact = fit_to_memory(
        given - 1, TrainStep(model, optimizer, LOSS), batch, exactness="rounding", progress=told.append
    )
    assert exact.plan.micro_batches is None
    assert any(line.startswith("micro_batches: layer 1 mixes the samples of a batch") for line in exact.left_out)
    parts: Choices = {"micro_batches": 2}
    assert exactness_of(parts, mixes_samples=True) == "reduced"  # statistics of smaller batches
    assert exactness_of(parts, mixes_samples=False) == "rounding"


@pytest.mark.parametrize("words", [{"exactness": "exact"}, {"batch_size": 0}, {"batch_size": "8"}, {"device": 3}])
def test_options_that_mean_nothing_are_refused_though_everything_fits(words: dict[str, Any]) -> None:
    model, optimizer, batch = training()
    with pytest.raises(UsageError):
        fit_to_memory("1 GiB", TrainStep(model, optimizer, LOSS), batch, **words)


def wide_training() -> tuple[nn.Module, torch.optim.Optimizer, tuple[torch.Tensor, torch.Tensor]]:
    """One whose optimizer's state is most of it, in blocks of one shape."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(8)), nn.Linear(128, 5))
    return model, torch.optim.AdamW(model.parameters()), (torch.randn(4, 128), torch.randint(0, 5, (4,)))


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
@pytest.mark.usefixtures("uncompiled_torchao")
@pytest.mark.slow
def test_moments_in_8_bits_are_considered_where_they_may_be() -> None:
    model, optimizer, batch = wide_training()
    given = flatout.forecast(TrainStep(model, optimizer, LOSS), batch)
    state, gradients = given.categories["optimizer"], given.categories["gradients"]
    budget = given.peak_bytes - gradients - int(0.3 * state)  # more than updates in backward alone give
    found = fit_to_memory(budget, TrainStep(model, optimizer, LOSS), batch, progress=lambda line: None)
    assert found.plan.optimizer_state == "8bit"
    assert found.forecast.peak_bytes <= budget
    chosen = next(one for one in found.considered if one.choices == found.plan.choices())
    assert chosen.exactness == "reduced"
    assert not optimizer.state
    with pytest.raises(UsageError, match="weights and the optimizer's state alone"):
        fit_to_memory(
            budget, TrainStep(model, optimizer, LOSS), batch, exactness="rounding", progress=lambda line: None
        )


@pytest.mark.slow
def test_what_is_not_considered_is_said() -> None:
    model, _, batch = wide_training()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    budget = int(0.9 * flatout.forecast(TrainStep(model, optimizer, LOSS), batch).peak_bytes)
    found = fit_to_memory(budget, TrainStep(model, optimizer, LOSS), batch, progress=lambda line: None)
    assert "not considered: optimizer_state 8bit: the optimizer is SGD, not torch.optim.Adam or AdamW" in str(found)
    assert "not considered: activation_offload: on a CPU" in str(found)


@pytest.mark.slow
def test_updates_in_backward_are_not_considered_where_a_hook_could_look_in_between() -> None:
    model, optimizer, batch = plain_training()
    optimizer.register_step_post_hook(lambda *_: None)  # a copy, of which the forecast is, has none
    step = TrainStep(model, optimizer, LOSS)
    limit = flatout.forecast(step, batch).peak_bytes - 1
    found = fit_to_memory(limit, step, batch, progress=lambda line: None)
    assert found.plan.optimizer_in_backward is None
    assert "not considered: optimizer_in_backward: there are hooks around the optimizer's step" in str(found)


def test_activations_may_wait_on_the_host_of_a_gpu() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.Tanh())), nn.Linear(256, 5))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batch = torch.randn(64, 256), torch.randint(0, 5, (64,))
    plan = Plan(micro_batches=1)
    given = flatout.forecast(TrainStep(model, optimizer, LOSS, plan), batch, device="rtx-4090", batch_size=65536)
    budget = int(0.65 * given.peak_bytes)
    words: dict[str, Any] = {"batch_size": 65536, "exactness": "rounding", "progress": lambda line: None}
    found = fit_to_memory(budget, TrainStep(model, optimizer, LOSS, plan), batch, device="rtx-4090", **words)
    assert found.plan.activation_offload
    assert found.forecast.peak_bytes <= budget
    one = next(one for one in found.considered if one.choices == {"activation_offload": True})
    operations = 6 * 65536 * 256 * 256 * 6  # three products a layer, all but the first layer's by its input
    expected = 1 + 2 * found.forecast.offloaded_bytes / 31.5e9 / (operations / 82.6e12)
    assert one.predicted_ratio == pytest.approx(expected, rel=0.1)
    given = flatout.forecast(TrainStep(model, optimizer, LOSS, plan), batch, device="gh200-96gb", batch_size=65536)
    budget = int(0.65 * given.peak_bytes)
    unknown = fit_to_memory(budget, TrainStep(model, optimizer, LOSS, plan), batch, device="gh200-96gb", **words)
    assert unknown.plan.activation_offload
    assert "time unknown" in str(unknown)
    assert any("no rate between GH200" in line for line in unknown.left_out)


def test_a_wide_last_layer_gets_the_chunked_loss_and_the_step_goes_on_with_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(2048, 16), nn.Tanh(), nn.Linear(16, 2048))
    step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), LOSS)
    batch = torch.randint(0, 2048, (64, 16)), torch.randint(0, 2048, (64, 16))
    budget = int(0.8 * flatout.forecast(step, batch).peak_bytes)
    words: dict[str, Any] = {"exactness": "rounding", "progress": lambda line: None}
    own = step.with_plan(Plan(micro_batches=1, optimizer_in_backward=False))
    found = fit_to_memory(budget, own, batch, **words)
    assert found.plan.loss == "chunked"
    expected = float(LOSS(model, batch).detach())
    own = own.with_plan(found.plan)
    run = LimitedRun("cpu", found.limit_bytes)
    with run:
        run.hold([*model.parameters(), *batch])
        losses = [float(own(batch)) for _ in range(2)]
    assert losses[0] == pytest.approx(expected)
    assert own.rolled_back == []
    own.close()


@pytest.mark.slow
def test_a_loss_that_looks_at_its_scores_is_not_offered_the_chunked_one() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(2048, 16), nn.Tanh(), nn.Linear(16, 2048))

    def loss(model: Any, batch: Any) -> Any:
        return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1) / 0.7, batch[1].flatten())

    step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), loss)
    batch = torch.randint(0, 2048, (64, 16)), torch.randint(0, 2048, (64, 16))
    budget = int(0.8 * flatout.forecast(step, batch).peak_bytes)
    found = fit_to_memory(budget, step, batch, exactness="rounding", progress=lambda line: None)
    assert found.plan.loss is None
    assert any(line.startswith("loss chunked: ") and "are used by" in line for line in found.left_out)
    step.close()


class Tight(nn.Module):
    """Runs out of memory with more than 8 real samples at once."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)), nn.Linear(64, 4))

    def forward(self, x: torch.Tensor) -> Any:
        if len(x) > 8 and not is_fake(x):
            raise torch.OutOfMemoryError("too many")
        return self.layers(x)


@pytest.mark.slow
def test_a_size_that_is_timed_fits_whole() -> None:
    """By default a step would split it and go on, and parts would be timed in its place."""
    model = Tight()
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), flatout.supervised(nn.CrossEntropyLoss()))
    batch = torch.randn(16, 64), torch.arange(16) % 4
    limit = int(0.9 * flatout.forecast(step, batch).peak_bytes)
    assert fit_to_memory(limit, step, batch, progress=lambda line: None).timed_by == "real steps of 8 samples"
