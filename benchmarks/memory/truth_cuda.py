"""What a case really holds on CUDA: the counters of torch's own caching allocator over two steps.

On a GPU, or on the stand-in without numbers (tests/gpu/stand_in), where torch's CUDA code runs and kernels do nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.memory.cases import Case
from flatout import TrainStep, forecast
from flatout.data.nested import to_device

STEPS = 2


def measured_on_cuda(case: Case, batch_size: int) -> dict[str, int]:
    """The most that was allocated and reserved during two steps; `tensor_bytes`: allocated as it was asked for."""
    torch.manual_seed(0)
    model = case.subject.make().cuda()
    optimizer = case.optimizer_of(model)
    batch = to_device(case.subject.batch(batch_size), "cuda")
    step = TrainStep(model, optimizer, case.subject.loss_fn, case.plan())
    for _ in range(STEPS):
        step(batch)
    torch.cuda.synchronize()
    found = torch.cuda.memory_stats()
    return {
        "allocated_bytes": found["allocated_bytes.all.peak"],
        "reserved_bytes": found["reserved_bytes.all.peak"],
        "tensor_bytes": found["requested_bytes.all.peak"],
    }


def forecast_for_cuda(case: Case, batch_size: int) -> dict[str, Any]:
    """The forecast of the model on the device, from an example batch of the case's smaller size."""
    torch.manual_seed(0)
    model, example = case.subject.make().cuda(), to_device(case.subject.batch(case.subject.sizes[0]), "cuda")
    optimizer = case.optimizer_of(model)
    found = forecast(
        TrainStep(model, optimizer, case.subject.loss_fn, case.plan()), example, batch_size=batch_size, device="cuda"
    )
    return {name: value for name, value in found.to_json().items() if name not in ("largest", "line")}
