"""What a block changes as it computes is, in its recomputation, as the first computation found it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flatout.errors import UsageError
from flatout.plan import Plan
from flatout.torch_private.late import dispatch
from flatout.train.loss import supervised
from flatout.train.step import TrainStep


class Counting(nn.Module):
    """Its result depends on a buffer that each call changes: in place, or by another tensor."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.layer, self.in_place = nn.Linear(8, 8), in_place
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mask", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        if self.in_place:
            self.calls += 1
        else:
            self.calls = self.calls + 1
        return x + torch.tanh(self.layer(x)) * self.mask / self.calls


class Shared(nn.Module):
    """Two layers, and two names of one layer, have the same buffer: one changes it, and the others read it."""

    def __init__(self) -> None:
        super().__init__()
        self.counter, self.reader = nn.Module(), nn.Linear(8, 8)
        self.counter.register_buffer("calls", torch.zeros(()))
        for name in ("calls", "divisor"):
            self.reader.register_buffer(name, self.counter.calls)

    def forward(self, x: Tensor) -> Tensor:
        self.counter.calls += 1
        return torch.tanh(self.reader(x)) * self.reader.calls / (1 + self.reader.divisor)


def normalised() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Tanh())


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "in place": lambda: Counting(in_place=True),
    "another": lambda: Counting(in_place=False),
    "shared": Shared,
    "spectral norm": normalised,
}


@pytest.mark.parametrize("kind", ["block", "selective"])
@pytest.mark.parametrize("block", BLOCKS)
def test_the_same_bits(block: str, kind: Any) -> None:
    trained = []
    for plan in (Plan(), Plan(activation_checkpointing=kind)):
        torch.manual_seed(0)
        model = nn.Sequential(*(BLOCKS[block]() for _ in range(3)), nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        step = TrainStep(model, optimizer, supervised(nn.CrossEntropyLoss()), plan)
        losses = [step((torch.randn(4, 8), torch.tensor([0, 1, 2, 0]))) for _ in range(3)]
        assert step.rolled_back == []
        trained.append([*losses, *model.state_dict().values()])
    assert all(torch.equal(a, b) for a, b in zip(*trained, strict=True))


def test_large_buffers_that_stay_as_they_are_are_copied_once() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Counting(in_place=True) for _ in range(2)), nn.Linear(8, 3))
    copied: list[int] = []

    class Mask(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is Tensor.clone:
                copied.append(1)
            return super().__torch_function__(func, types, args, kwargs or {})

    model[0].mask = torch.ones(8).as_subclass(Mask)  # type: ignore[assignment]
    plan = Plan(activation_checkpointing="block")
    step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), supervised(nn.CrossEntropyLoss()), plan)
    for _ in range(3):
        step((torch.randn(4, 8), torch.tensor([0, 1, 2, 0])))
    assert len(copied) == 2  # by the step itself, which may have to try its first batch again, and by the first call


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(nn.functional.relu(x, inplace=True))


def test_a_block_that_changes_its_input_is_named() -> None:
    model = nn.Sequential(nn.Linear(8, 8), *(InPlace() for _ in range(3)), nn.Linear(8, 3))
    optimizer, loss_fn = torch.optim.SGD(model.parameters(), 0.1), supervised(nn.CrossEntropyLoss())
    batch = (torch.randn(4, 8), torch.tensor([0, 1, 2, 0]))
    step = TrainStep(model, optimizer, loss_fn, Plan(activation_checkpointing="block"))
    with pytest.raises(UsageError, match="InPlace, changes its input in place"):
        step(batch)
    step.with_plan(Plan())(batch)


class Noisy(nn.Module):
    """Its noise comes from a generator that torch's checkpoint does not put back."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.layer, self.source, self.own = nn.Linear(8, 8), source, torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.layer(x))
        noise: Any = random.random() if self.source == "python" else float(np.random.rand())
        if self.source == "own":
            noise = torch.rand(hidden.shape, generator=self.own)
        return x + hidden * torch.sin(hidden * noise)


@pytest.mark.parametrize("kind", ["block", "selective"])
@pytest.mark.parametrize("source", ["python", "numpy", "own"])
def test_the_same_random_numbers(source: str, kind: Any) -> None:
    trained = []
    for plan in (Plan(), Plan(activation_checkpointing=kind)):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        model = nn.Sequential(*(Noisy(source) for _ in range(3)), nn.Linear(8, 3))
        step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), supervised(nn.CrossEntropyLoss()), plan)
        losses = [step((torch.randn(4, 8), torch.tensor([0, 1, 2, 0]))) for _ in range(2)]
        after = [torch.tensor(random.random()), torch.tensor(np.random.rand()), torch.rand((), generator=model[0].own)]
        trained.append([*losses, *after, *model.state_dict().values()])
    assert all(torch.equal(a, b) for a, b in zip(*trained, strict=True))


class Late(nn.Module):
    """Its average begins with the third call."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.layer, self.in_place, self.calls = nn.Linear(8, 8), in_place, 0
        self.register_buffer("average", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += dispatch().current_graph_task() == -1  # not in the recomputation
        if self.calls > 2 and self.in_place:
            self.average += 1
        elif self.calls > 2:
            self.average = self.average + 1
        return x + torch.tanh(self.layer(x)) * (1 + self.average)


def test_a_buffer_that_changes_later_is_found_as_it_was_or_refused() -> None:
    trained = []
    for plan in (Plan(), Plan(activation_checkpointing="block")):
        torch.manual_seed(0)
        model = nn.Sequential(*(Late(in_place=False) for _ in range(2)), nn.Linear(8, 3))
        step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), supervised(nn.CrossEntropyLoss()), plan)
        losses = [step((torch.randn(4, 8), torch.tensor([0, 1, 2, 0]))) for _ in range(5)]
        trained.append([*losses, *model.state_dict().values()])
    assert all(torch.equal(a, b) for a, b in zip(*trained, strict=True))
    model = nn.Sequential(*(Late(in_place=True) for _ in range(2)), nn.Linear(8, 3))
    step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), supervised(nn.CrossEntropyLoss()), plan)
    for _ in range(2):
        step((torch.randn(4, 8), torch.tensor([0, 1, 2, 0])))
    with pytest.raises(UsageError, match="Late, changes its buffer average, which its first call did not change"):
        step((torch.randn(4, 8), torch.tensor([0, 1, 2, 0])))
