"""Choices of a plan that change nothing: those that are off, and those that find nothing to act on, which are told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from flatout.kernels.bf16_products import obstacle
from flatout.kernels.native import native
from flatout.levers import bf16_kernels, fused_norm
from flatout.levers.applied import Applied
from flatout.levers.catalogue import LEVERS
from flatout.levers.lever import choices_of_plan
from flatout.levers.subject import Subject
from flatout.plan import Plan
from flatout.precision.denormals import flushed_here
from flatout.train.loss import supervised
from flatout.train.step import TrainStep


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))


def after_a_step(model: nn.Module, plan: Plan, x: Tensor | None = None) -> list[tuple[str, str]]:
    step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), supervised(nn.CrossEntropyLoss()), plan)
    dtype = next(model.parameters()).dtype
    step((torch.randn(2, 4, dtype=dtype) if x is None else x, torch.tensor([0, 1])))
    told = step.rolled_back
    step((torch.randn(2, 4, dtype=dtype) if x is None else x, torch.tensor([0, 1])))
    assert step.rolled_back == told  # once
    step.close()
    return told


with_kernels = pytest.mark.skipif(native("batch_norm").library is None, reason="the kernels cannot be built here")
with_products = pytest.mark.skipif(obstacle() is not None, reason="this processor has no products of bf16")


@pytest.mark.parametrize(
    ("choice", "why"),
    [
        ({"attention": "fused"}, "no module computes attention by hand"),
        ({"memory_format": "channels_last"}, "in the first step it saw no 2-d convolution"),
        ({"compile": "regional"}, "the model has no repeated block"),
        pytest.param({"normalization": "fused"}, "it saw no batch norm of 524,288 numbers or more", marks=with_kernels),
        pytest.param({"kernels": "bf16"}, "it saw no linear layer, attention or tanh-GELU", marks=with_products),
    ],
)
def test_a_step_tells_what_does_nothing(choice: dict[str, Any], why: str) -> None:
    ((_, told),) = after_a_step(perceptron(), Plan(**choice))
    assert why in told


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_step_tells_that_autocast_is_not_for_such_weights(dtype: torch.dtype, precision: Any) -> None:
    ((label, told),) = after_a_step(perceptron().to(dtype), Plan(precision=precision))
    assert (label, str(dtype).removeprefix("torch.") in told) == (f"{precision} autocast", True)
    assert after_a_step(perceptron(), Plan(precision=precision)) == []


class ByFunctions(nn.Module):
    """Without layers of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.filters, self.weight = nn.Parameter(torch.randn(3, 1, 1, 1)), nn.Parameter(torch.randn(3, 12))

    def forward(self, x: Tensor) -> Tensor:
        images = functional.conv2d(x.view(2, 1, 2, 2), self.filters)
        normed = functional.batch_norm(images, None, None, training=True)
        return functional.linear(normed.flatten(1), self.weight)


@pytest.mark.parametrize(
    "choice",
    [
        {"memory_format": "channels_last"},
        pytest.param({"normalization": "fused"}, marks=with_kernels),
        pytest.param({"kernels": "bf16"}, marks=with_products),
    ],
)
def test_what_acts_tells_nothing(choice: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_norm, "LEAST_ELEMENTS", 1)
    monkeypatch.setattr(bf16_kernels, "LEAST_IN_LINEAR", 1)
    choice = choice | ({"precision": "bf16"} if "kernels" in choice else {})
    assert after_a_step(ByFunctions(), Plan(**choice)) == []


def test_a_model_that_is_compiled_stays_as_it_is() -> None:
    model = perceptron()
    model._compiled_call_impl = torch.compile(model._call_impl, backend="eager")
    before = model._compiled_call_impl
    ((_, told),) = after_a_step(model, Plan(compile="default"))
    assert "compiled already" in told
    assert model._compiled_call_impl is before
    torch._dynamo.reset()


def test_in_a_script_other_models_may_come() -> None:
    subject = Subject()
    model = perceptron()
    subject.modules.add(model)
    applied = Applied(subject)
    applied.set(choices_of_plan(Plan(attention="fused", memory_format="channels_last").choices(), LEVERS))
    assert (len(applied.choices), applied.rolled_back, subject.incidents) == (2, [], [])
    applied.set([])


def test_what_is_off_is_not_turned_on() -> None:
    """`flush_denormals = False` flushed them; in a script, `non_blocking` and `pin_memory` were turned on likewise."""
    assert after_a_step(perceptron(), Plan(flush_denormals=False)) == []
    off = Plan(flush_denormals=False, pin_memory=False, non_blocking=False, optimizer_in_backward=False)
    off = off.with_choice("activation_offload", False, "").with_choice("precision", "fp32", "as it is")
    assert choices_of_plan(off.choices(), LEVERS) == []
    model = perceptron()
    step = TrainStep(
        model, torch.optim.SGD(model.parameters()), supervised(nn.CrossEntropyLoss()), Plan(flush_denormals=False)
    )
    assert not flushed_here()
    step.close()
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        applied = Applied(Subject())
        applied.set(choices_of_plan(Plan(cudnn_benchmark=False).choices(), LEVERS))
        assert not torch.backends.cudnn.benchmark
        applied.set([])
        assert torch.backends.cudnn.benchmark
    finally:
        torch.backends.cudnn.benchmark = before
