"""Measures against memory on a real GPU, where there is one."""

from __future__ import annotations

import gc
import importlib.util
import os

import pytest
import torch
from torch import nn

import flatout
from flatout.plan import Plan
from flatout.train.step import TrainStep

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
LOSS = flatout.supervised(nn.CrossEntropyLoss())
# The stand-in computes on the host: no faster, and without the workspace that cuBLAS takes on such a GPU.
STAND_IN = "STAND_IN" in os.environ
SAMPLES, WIDTH = (2048, 256) if STAND_IN else (8192, 1024)
ABSENT_BYTES = (8 * 1024 + 128) * 1024 if STAND_IN else 0


def training() -> tuple[nn.Module, torch.optim.Optimizer, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 10)).cuda()
    batch = torch.randn(SAMPLES, WIDTH, device="cuda"), torch.randint(0, 10, (SAMPLES,), device="cuda")
    return model, torch.optim.AdamW(model.parameters(), 1e-3), batch


def run(plan: Plan) -> tuple[list[torch.Tensor], int]:
    """Weights after some steps, on the host; bytes at the peak of the last two, of what these steps hold alone."""
    gc.collect()  # an earlier step in a cycle, freed in between, would make this one look smaller
    torch._C._cuda_clearCublasWorkspaces()  # those of this run count, not of an earlier one
    before = torch.cuda.memory_allocated()
    model, optimizer, batch = training()
    step = TrainStep(model, optimizer, LOSS, plan)
    for _ in range(3):
        step(batch)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        step(batch)
    torch.cuda.synchronize()
    assert not step.rolled_back
    return [one.cpu() for one in model.parameters()], torch.cuda.max_memory_allocated() - before


def test_activations_wait_in_the_host_s_memory_with_the_same_bits() -> None:
    weights, plain_bytes = run(Plan())
    away, away_bytes = run(Plan(activation_offload=True))
    assert all(torch.equal(one, other) for one, other in zip(weights, away, strict=True))
    model, optimizer, batch = training()
    made = flatout.forecast(TrainStep(model, optimizer, LOSS, Plan(activation_offload=True)), batch)
    assert made.offloaded_bytes > 0.4 * plain_bytes
    assert away_bytes < 0.7 * plain_bytes
    assert made.tensor_bytes - ABSENT_BYTES == pytest.approx(away_bytes, rel=0.15)


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
def test_moments_in_8_bits_take_a_quarter() -> None:
    _, plain_bytes = run(Plan())
    weights, bytes_8bit = run(Plan(optimizer_state="8bit"))
    assert all(one.isfinite().all() for one in weights)
    parameters = sum(one.numel() for one in weights)
    assert plain_bytes - bytes_8bit > 0  # two fp32 copies of one layer are held meanwhile
    assert plain_bytes - bytes_8bit < 6.1 * parameters


def test_a_forecast_is_what_the_allocator_then_holds() -> None:
    model, optimizer, batch = training()
    made = flatout.forecast(TrainStep(model, optimizer, LOSS), batch)
    del model, optimizer, batch
    _, peak_bytes = run(Plan())
    assert made.tensor_bytes - ABSENT_BYTES == pytest.approx(peak_bytes, rel=0.1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(64, 256, num_layers=2, batch_first=True), nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.lstm(x)[0][:, -1])
        return found


@pytest.mark.skipif(STAND_IN, reason="cuDNN does not start there")
def test_what_cudnn_takes_for_recurrent_layers_is_measured() -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer, tuple[torch.Tensor, torch.Tensor]]:
        torch.manual_seed(0)
        model = Recurrent().cuda()
        batch = torch.randn(96, 100, 64, device="cuda"), torch.randint(0, 10, (96,), device="cuda")
        return model, torch.optim.AdamW(model.parameters(), 1e-3), batch

    found = flatout.forecast(TrainStep(*made()[:2], LOSS), made()[2])
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    before = torch.cuda.memory_allocated()
    model, optimizer, batch = made()
    step = TrainStep(model, optimizer, LOSS)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        step(batch)
    torch.cuda.synchronize()
    assert found.tensor_bytes == pytest.approx(torch.cuda.max_memory_allocated() - before, rel=0.08)


def test_the_largest_batch_under_a_limit_is_found_and_the_limit_taken_back() -> None:
    model = nn.Sequential(nn.Linear(64, 4096), nn.GELU(), nn.Linear(4096, 10)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    batch = torch.randn(64, 64, device="cuda"), torch.randint(0, 10, (64,), device="cuda")
    torch.cuda.empty_cache()
    limit = torch.cuda.memory_reserved() + 128 * 2**20
    found = flatout.largest_batch(TrainStep(model, optimizer, LOSS), batch, limit=limit, multiple_of=256)
    assert 0 < found.peak_bytes <= limit
    assert any(not one.fitted for one in found.tries)
    assert torch.cuda.get_per_process_memory_fraction() == 1
