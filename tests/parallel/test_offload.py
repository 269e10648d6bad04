"""`fsdp_cpu_offload` where it cannot be, and which device a step then has; training with it is in tests/gpu."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flatout import Plan, TrainStep, forecast, supervised
from flatout.errors import PlanError, UsageError
from flatout.parallel import shard
from flatout.parallel.whole_tensors import home_of


@pytest.mark.parametrize(
    ("gpu", "backends", "said"),
    [
        (False, "cpu:gloo", "fsdp_cpu_offload on a machine without a GPU"),
        (True, "cuda:nccl", r"the ranks send to each other by cuda:nccl.*init_process_group\('cpu:gloo,cuda:nccl'\)"),
        (True, "cpu:gloo,cuda:nccl", ""),
    ],
)
def test_it_needs_a_gpu_and_a_group_for_the_hosts_memory(
    gpu: bool, backends: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda: backends)
    if not said:
        shard._check_offload()
        return
    with pytest.raises(PlanError, match=said):
        shard._check_offload()


def test_a_part_in_the_hosts_memory_is_computed_with_on_the_gpu_of_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    mesh = SimpleNamespace(device_type="cuda")
    part: Any = SimpleNamespace(device=torch.device("cpu"), full_tensor=None, placements=(), device_mesh=mesh)
    assert home_of(part) == torch.device("cuda", 1)
    mesh.device_type = "cpu"
    assert home_of(part) == torch.device("cpu")
    assert home_of(torch.zeros(1)) == torch.device("cpu")


def test_what_waits_in_the_hosts_memory_is_not_forecast() -> None:
    model = torch.nn.Linear(4, 2)
    plan = Plan(parallel="fsdp", fsdp_cpu_offload=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = TrainStep(model, optimizer, supervised(torch.nn.CrossEntropyLoss()), plan)  # alone, it changes nothing
    batch = torch.randn(8, 4), torch.zeros(8, dtype=torch.int64)
    with pytest.raises(UsageError, match=r"fsdp_cpu_offload is set; what waits in the host's memory is not forecast"):
        forecast(step, batch, ranks=2)


def test_a_loss_scaler_does_not_go_with_it() -> None:
    with pytest.raises(PlanError, match="a loss scaler needs gradients on the GPU"):
        Plan(parallel="fsdp", fsdp_cpu_offload=True, precision="fp16")
