"""Buffers are put back whatever kind of tensor they are, and whatever the layers that hold them do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatout.buffers import buffers_of, found_buffers
from flatout.plan import Plan
from flatout.train.loss import supervised
from flatout.train.step import TrainStep


def plain() -> Tensor:
    return torch.ones(3)


def of_inference_mode() -> Tensor:
    with torch.inference_mode():
        return torch.ones(3)


class Holder(nn.Module):
    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table)
        self.register_buffer("none", None)
        self.table: Any


def add_one(layer: Holder) -> None:
    with torch.inference_mode(layer.table.is_inference()):
        layer.table += 1


def add_unseen(layer: Holder) -> None:
    layer.table.numpy()[:] += 1


def another(layer: Holder) -> None:
    layer.table = layer.table + 1


def delete(layer: Holder) -> None:
    del layer.table


@pytest.mark.parametrize("make", [plain, of_inference_mode])
@pytest.mark.parametrize("change", [add_one, add_unseen, another, delete])
def test_the_same_tensor_with_the_same_values(make: Callable[[], Tensor], change: Callable[[Holder], None]) -> None:
    layer = Holder(make())
    table = layer.table
    (found,) = found_buffers(buffers_of(layer))
    assert (found.was_changed(), found.holds_others(), found.put_back()) == (False, False, False)
    change(layer)
    assert found.was_changed() or found.holds_others()
    assert found.put_back() == (change is not delete)
    assert layer.table is table
    assert torch.equal(table, torch.ones(3))


def test_what_cannot_be_written_or_compared_stays_as_it_is() -> None:
    for table in (torch.ones(1).expand(5), torch.ones(3).to_sparse()):
        layer = Holder(table)
        (found,) = found_buffers(buffers_of(layer))
        assert not found.put_back()
        layer.table = torch.zeros(())
        assert not found.put_back()  # of another shape: a table that is made as long as it is needed
        assert layer.table is table


def test_only_those_that_are_asked_for_are_copied() -> None:
    model = nn.Sequential(Holder(plain()), Holder(plain()))
    first, second = found_buffers(buffers_of(model), {(id(model[1]), "table")})
    assert first.value is None
    assert second.value is not None
    add_one(model[0])  # type: ignore[arg-type]
    assert (first.was_changed(), second.was_changed()) == (True, False)


class Normed(nn.Module):
    """Its scale never changes, and its statistics do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(8))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) * self.scale


class Incomparable(Normed):
    def __eq__(self, other: object) -> bool:
        raise TypeError("nothing compares with it")

    def __hash__(self) -> int:
        return id(self)


def scripted() -> nn.Module:
    with pytest.warns((DeprecationWarning, FutureWarning), match="torch.jit.script"):
        return torch.jit.script(Normed())


@pytest.mark.parametrize("make", [Incomparable, scripted])
@pytest.mark.parametrize("plan", [Plan(), Plan(nonfinite="skip"), Plan(activation_checkpointing="block")])
def test_layers_of_any_kind_train(make: Callable[[], nn.Module], plan: Plan) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(make(), nn.Linear(8, 8)) for _ in range(3)), nn.Linear(8, 3))
    step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), supervised(nn.CrossEntropyLoss()), plan)
    batch = torch.randn(4, 8), torch.tensor([0, 1, 2, 0])
    for _ in range(3):
        assert step(batch).isfinite()
    assert step.rolled_back == []
    assert model[0][0].norm.num_batches_tracked == 3


@pytest.mark.parametrize("make", [plain, of_inference_mode])
def test_a_skipped_step_leaves_buffers_of_any_kind(make: Callable[[], Tensor]) -> None:
    class Counting(Holder):
        def forward(self, x: Tensor) -> Tensor:
            add_one(self)
            return x

    model = nn.Sequential(Counting(make()), nn.Linear(8, 3))
    plan = Plan(nonfinite="skip")
    step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), supervised(nn.CrossEntropyLoss()), plan)
    targets = torch.tensor([0, 1, 2, 0])
    for value in (torch.nan, 1.0, torch.nan, 1.0):
        step((torch.full((4, 8), value), targets))
    assert step.skipped == 2
    assert torch.equal(model[0].table, torch.full((3,), 3.0))
