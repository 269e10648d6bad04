"""The largest batch: equal to trying all sizes, never one that was not tried, and nothing of the user's changed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import flatout
from flatout.arguments import as_bytes
from flatout.data.nested import repeat_batch
from flatout.errors import MachineError, UsageError
from flatout.memory.real_run import LimitedRun
from flatout.plan import Plan
from flatout.sizing import target as targets
from flatout.sizing.largest_batch import Try, _Search, largest_batch
from flatout.sizing.target import find_target, transfer_time
from flatout.sizing.training import Training
from flatout.train.step import TrainStep

LOSS = flatout.supervised(nn.CrossEntropyLoss())
BATCH = (torch.randn(4, 1, 8, 8), torch.randint(0, 10, (4,)))


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(), nn.Linear(288, 10)
    )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))


MODELS: list[Callable[[], nn.Module]] = [conv, mlp]
OPTIMIZERS: list[Callable[..., Any]] = [torch.optim.AdamW, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)]


def fits(model: nn.Module, optimizer: Any, size: int, limit: int) -> bool:
    step = TrainStep(model, optimizer, LOSS, Plan(out_of_memory="raise"))
    run = LimitedRun("cpu", limit)
    try:
        with run:
            run.hold([*model.parameters(), *model.buffers()])
            batch = repeat_batch(BATCH, size)
            run.hold(batch)
            for _ in range(2):
                step(batch)
    except torch.OutOfMemoryError:
        return False
    return True


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=["adamw", "sgd"])
def test_equals_trying_every_size(make: Callable[[], nn.Module], optimizer: Callable[..., Any]) -> None:
    model = make()
    limit = 800_000
    found = largest_batch(TrainStep(model, optimizer(model.parameters()), LOSS), BATCH, limit=limit)
    assert len(found.tries) <= 5
    assert any(one.batch_size == found.batch_size and one.fitted for one in found.tries)
    assert found.peak_bytes <= limit
    sizes = range(max(1, found.batch_size - 3), found.batch_size + 4)
    fresh = [fits(model := make(), optimizer(model.parameters()), size, limit) for size in sizes]
    assert fresh == [size <= found.batch_size for size in sizes]


def test_nothing_of_the_user_s_is_changed() -> None:
    torch.manual_seed(0)
    model = conv()
    optimizer = torch.optim.Adam(model.parameters())
    step = TrainStep(model, optimizer, LOSS)
    step(BATCH)
    model[1].eval()
    gradients = [one.grad.clone() for one in model.parameters() if one.grad is not None]
    before = [one.clone() for one in (*model.parameters(), *model.buffers())]
    moments = [one.clone() for state in optimizer.state.values() for one in state.values()]
    identities = [id(one) for state in optimizer.state.values() for one in state.values()]
    random = torch.get_rng_state()
    largest_batch(TrainStep(model, optimizer, LOSS), BATCH, limit=500_000, at_most=64)
    assert all(torch.equal(a, b) for a, b in zip((*model.parameters(), *model.buffers()), before, strict=True))
    assert [id(one) for state in optimizer.state.values() for one in state.values()] == identities
    seen = [one for state in optimizer.state.values() for one in state.values()]
    assert all(torch.equal(a, b) for a, b in zip(seen, moments, strict=True))
    assert torch.equal(torch.get_rng_state(), random)
    now = [one.grad for one in model.parameters() if one.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(now, gradients, strict=True))
    assert not model[1].training
    assert model.training


def test_a_fresh_optimizer_has_no_state_afterwards() -> None:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    largest_batch(TrainStep(model, optimizer, LOSS), BATCH, limit=500_000, at_most=8)
    assert not optimizer.state
    assert all(one.grad is None for one in model.parameters())


@pytest.mark.slow
def test_sizes_asked_for() -> None:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    found = largest_batch(TrainStep(model, optimizer, LOSS), BATCH, limit=800_000, multiple_of=8)
    assert found.batch_size % 8 == 0
    capped = largest_batch(TrainStep(model, optimizer, LOSS), BATCH, limit=1 << 30, at_most=24)
    assert capped.batch_size == 24
    lines: list[str] = []
    split = largest_batch(
        TrainStep(model, optimizer, LOSS), BATCH, limit=800_000, global_batch=1024, progress=lines.append
    )
    assert split.plan.micro_batches == -(-1024 // split.batch_size)
    assert any(line.startswith("forecasting") for line in lines)
    assert any(line.startswith("trying") for line in lines)
    assert str(split.batch_size) in str(split)


def peak_of(step: TrainStep, samples: int) -> int:
    """Of two real steps and nothing else."""
    run, batch = LimitedRun("cpu", 1 << 40), repeat_batch(BATCH, samples)
    with run:
        run.hold([*step.model.parameters(), *batch])
        for _ in range(2):
            step(batch)
    return run.peak_bytes


def test_a_global_batch_is_tried_as_it_will_be_accumulated() -> None:
    """With its samples in memory, and gradients that are held from the first part on."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = largest_batch(TrainStep(model, optimizer, LOSS), BATCH, limit=700_000, global_batch=1024)
    assert found.plan.micro_batches is not None
    assert found.plan.micro_batches > 2
    took = peak_of(TrainStep(model, optimizer, LOSS, found.plan), 1024)
    assert took <= found.peak_bytes <= found.limit_bytes
    assert took == pytest.approx(found.peak_bytes, rel=0.1)  # its parts are equal, and so a little smaller


@pytest.mark.slow
def test_parts_that_the_plan_asks_for_are_tried() -> None:
    sizes = []
    for plan in (Plan(), Plan(micro_batches=8)):
        model = mlp()
        step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), LOSS, plan)
        found = largest_batch(step, BATCH, limit=700_000)
        assert found.plan == plan
        sizes.append(found.batch_size)
    assert sizes[1] > sizes[0]


def test_bad_input() -> None:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(MachineError, match=r"a batch of 1 takes more than 19\.5 KiB"):
        largest_batch(TrainStep(model, optimizer, LOSS), BATCH, limit=20_000)
    with pytest.raises(UsageError, match="limit is 0"):
        largest_batch(TrainStep(model, optimizer, LOSS), BATCH, limit=0)
    with pytest.raises(UsageError, match="multiple_of is 8"):
        largest_batch(TrainStep(model, optimizer, LOSS), BATCH, limit=1 << 20, at_most=4, multiple_of=8)
    with pytest.raises(UsageError, match="without a tensor"):
        largest_batch(TrainStep(model, optimizer, LOSS), "text", limit=1 << 20)


class OfCuda:
    """Stands for torch.cuda with two GPUs, the first of which is the current one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fractions: list[tuple[float, Any]] = []
        properties = type(
            "Properties", (), {"major": 8, "minor": 9, "multi_processor_count": 128, "total_memory": 1000}
        )
        answers: dict[str, Any] = {
            "is_available": lambda: True,
            "device_count": lambda: 2,
            "current_device": lambda: 0,
            "get_device_properties": lambda device: properties,
            "empty_cache": lambda: None,
            "reset_peak_memory_stats": lambda device: None,
            "max_memory_reserved": lambda device: 7,
            "get_per_process_memory_fraction": lambda device: 0.75,
            "set_per_process_memory_fraction": lambda share, device: self.fractions.append((share, device.index)),
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, answer)


def test_a_limit_on_cuda_is_set_on_the_models_own_device_and_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = OfCuda(monkeypatch)
    parameter = type("Parameter", (), {"device": torch.device("cuda", 1)})()
    target = find_target(None, type("Model", (), {"parameters": lambda self: iter([parameter])})())
    assert target.name == "cuda:1"
    with LimitedRun(target.name, 500) as run:
        assert cuda.fractions == [(0.5, 1)]
    assert cuda.fractions == [(0.5, 1), (0.75, 1)]
    assert run.peak_bytes == 7


def test_cuda_without_a_number_is_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    OfCuda(monkeypatch)
    assert find_target("cuda", mlp()).name == "cuda:0"
    assert find_target("cuda:1", mlp()).multiprocessors == 128


def test_the_link_is_measured_of_the_gpu_that_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    OfCuda(monkeypatch)
    entered: list[object] = []

    def current(index: int) -> contextlib.AbstractContextManager[None]:
        entered.append(index)
        return contextlib.nullcontext()

    monkeypatch.setattr(torch.cuda, "device", current)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    monkeypatch.setattr(targets, "transfer_peak", lambda *_, **__: (None, f"not measured in {entered}"))
    assert transfer_time(find_target("cuda:1", mlp()), Plan(), 1, 1.0)[1].endswith("not measured in [1]")


def test_tries_that_take_the_same_do_not_say_that_more_samples_take_nothing() -> None:
    model = mlp()
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), LOSS)
    search = _Search(Training.of(step, BATCH), 60 << 20, 1, None, lambda line: None)
    search.tries = [Try(batch_size=size, peak_bytes=42 << 20, fitted=True) for size in (1000, 1001)]
    assert search._bytes_a_unit(1001, search.tries[-1]) == pytest.approx((42 << 20) / 1001, rel=0.01)


def test_a_loss_that_differentiates_by_itself_is_tried_in_training() -> None:
    def penalty(model: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_(True)
        (found,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return found.square().sum(1).mean() + model(x).square().mean()

    model, said = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)), list[str]()
    step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), penalty)
    found = largest_batch(step, torch.randn(8, 8), limit="1 MiB", at_most=16, progress=said.append)
    assert found.batch_size == 16
    assert any("cannot be evaluated without gradients, so only training was tried: RuntimeError" in one for one in said)


def test_a_single_sample_that_batch_norm_cannot_take_is_no_size() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), flatout.supervised(nn.CrossEntropyLoss()))
    batch = (torch.randn(8, 8), torch.arange(8) % 4)
    with pytest.raises(MachineError, match=r"takes more than"):
        largest_batch(step, batch, limit="1 KiB", progress=lambda line: None)


@pytest.mark.parametrize("limit", [float(1 << 30), np.int64(1 << 30), "1 GiB", " 1 gib "])
def test_a_limit_in_any_form(limit: Any) -> None:
    assert as_bytes(limit, "limit") == 1 << 30


@pytest.mark.parametrize("limit", [0, -1, 0.5, float("nan"), float("inf"), True, 10**400, "0", "nan", "-1", "1e9", ""])
def test_a_limit_that_is_none(limit: Any) -> None:
    with pytest.raises(UsageError, match=r"whole number of bytes above 0|is not a size"):
        as_bytes(limit, "limit")
