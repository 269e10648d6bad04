"""Activations that wait elsewhere: the same bits, less held, each tensor moved once; on a stand-in for the host."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import flatout
from flatout.levers.activation_offload import LEAST_BYTES, Host, offloading_to
from flatout.plan import Plan
from flatout.train.step import TrainStep

LOSS = flatout.supervised(nn.CrossEntropyLoss())
PLAN = Plan(activation_offload=True)


class StandIn(Host):
    """A host for tensors of the CPU: what left is a copy, so that a later change of the original would be seen."""

    def __init__(self) -> None:
        super().__init__()
        self.left: list[torch.Size] = []
        self.came_back = 0

    def takes(self, tensor: Any) -> bool:
        return True

    def out(self, tensor: Any) -> Any:
        self.left.append(tensor.shape)
        return tensor.clone()

    def back(self, there: Any, device: Any) -> Any:
        self.came_back += 1
        return there.clone()


class Branches(nn.Module):
    """One tensor saved twice, one changed in place after it was saved, dropout, an expanded one, tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(64, 256), nn.Linear(256, 256), nn.Linear(256, 3)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Any) -> Any:
        hidden = self.first(x).sigmoid()
        hidden = hidden * self.second(hidden) * torch.ones(1, 256).expand(len(x), 256)
        hidden = self.dropout(hidden).exp()
        return self.head(nn.functional.linear(hidden + 1, self.second.weight))


def batch(samples: int = 512) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(samples, 64), torch.randint(0, 3, (samples,))


def trained(plan: Plan) -> tuple[list[torch.Tensor], TrainStep]:
    torch.manual_seed(0)
    model = Branches()
    step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), LOSS, plan)
    for _ in range(3):
        step(batch())
    return [one.detach().clone() for one in model.parameters()], step


@pytest.mark.parametrize(
    "choices", [{}, {"micro_batches": 2}, {"precision": "bf16"}, {"activation_checkpointing": "block"}]
)
def test_the_same_bits(choices: dict[str, Any]) -> None:
    plainly, _ = trained(Plan(**choices))
    with offloading_to(StandIn()) as host:
        away, step = trained(Plan(activation_offload=True, **choices))
    assert not step.rolled_back or choices == {"activation_checkpointing": "block"}  # it has no repeated block
    assert all(torch.equal(one, other) for one, other in zip(plainly, away, strict=True))
    assert host.moved_bytes > 0


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Any) -> Any:
        return x + self.down(self.up(x).tanh())


def trained_blocks(plan: Plan) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), Block(), nn.Linear(64, 3))
    step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), LOSS, plan)
    for _ in range(3):
        step(batch())
    assert not step.rolled_back
    return [one.detach().clone() for one in model.parameters()]


def test_with_selective_checkpointing_the_bits_are_the_same_too() -> None:
    plainly = trained_blocks(Plan())
    with offloading_to(StandIn()) as host:
        away = trained_blocks(Plan(activation_offload=True, activation_checkpointing="selective"))
    assert all(torch.equal(one, other) for one, other in zip(plainly, away, strict=True))
    assert host.moved_bytes > 0


def test_what_selective_checkpointing_keeps_leaves_too_where_torch_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.15 warns where this is not said."""
    made: list[Any] = []
    plain = torch.utils.checkpoint.create_selective_checkpoint_contexts

    def contexts(policy: Any) -> Any:
        forward, recomputation = plain(policy)
        forward.respect_saved_tensors_hooks = None
        made.append(forward)
        return forward, recomputation

    monkeypatch.setattr(torch.utils.checkpoint, "create_selective_checkpoint_contexts", contexts)
    trained_blocks(Plan(activation_checkpointing="selective"))
    assert [one.respect_saved_tensors_hooks for one in made] == [True] * 9


def test_what_is_saved_twice_leaves_once_and_weights_stay() -> None:
    with offloading_to(StandIn()) as host:
        trained(PLAN)
    assert isinstance(host, StandIn)
    assert torch.Size((256, 256)) not in host.left
    assert torch.Size((3,)) not in host.left
    assert host.left.count(torch.Size((512, 256))) <= 3 * 7  # a step saves ten of that shape, some of them twice
    assert host.moved_bytes == sum(4 * one.numel() for one in host.left)


def test_small_tensors_stay() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    with offloading_to(StandIn()) as host:
        TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), LOSS, PLAN)(
            (torch.randn(4, 8), torch.randint(0, 3, (4,)))
        )
    assert host.moved_bytes == 0
    assert LEAST_BYTES > 4 * 8 * 4


def test_evaluation_moves_nothing_and_the_lever_is_taken_back() -> None:
    torch.manual_seed(0)
    model = Branches()
    with offloading_to(StandIn()) as host:
        step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), LOSS, PLAN)
        with torch.no_grad():
            model(batch()[0])
        assert host.moved_bytes == 0
        step.close()
        LOSS(model, batch()).backward()
    assert host.moved_bytes == 0


def test_on_a_cpu_it_is_rolled_back_with_the_reason() -> None:
    _, step = trained(PLAN)
    ((label, reason),) = step.rolled_back
    assert label == "activation offload"
    assert "host memory already" in reason


def test_a_forecast_for_a_gpu_moves_what_the_step_would() -> None:
    torch.manual_seed(0)
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = copy.deepcopy(model.state_dict())
    plain, away = (
        flatout.forecast(TrainStep(model, optimizer, LOSS, plan), batch(), device="rtx-4090") for plan in (Plan(), PLAN)
    )
    with offloading_to(StandIn()) as host:
        TrainStep(model, optimizer, LOSS, PLAN)(batch())
    assert away.offloaded_bytes == pytest.approx(host.moved_bytes, rel=0.15)  # dropout keeps a mask of bytes on CUDA
    assert away.categories["activations"] < 0.3 * plain.categories["activations"]
    assert away.tensor_bytes < plain.tensor_bytes
    assert f"{away.offloaded_bytes / 2**20:.2f} MiB offloaded to the host's memory" in str(away)
    assert plain.offloaded_bytes == 0
    assert before.keys() == model.state_dict().keys()
    assert flatout.forecast(TrainStep(model, optimizer, LOSS, PLAN), batch()).offloaded_bytes == 0  # on the CPU
