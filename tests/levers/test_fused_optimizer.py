"""Fused kernels walk weights and gradients flat: where a closure makes the gradients, they are laid out behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flatout.errors import UsageError
from flatout.levers.fused_optimizer import FusedOptimizer
from flatout.levers.subject import Subject
from flatout.plan import Plan
from flatout.precision.fused_sgd import types_lost_if_fused
from flatout.train.loss import supervised
from flatout.train.step import TrainStep

KINDS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda p: torch.optim.Adam(p, 1e-2),
    lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9, dampening=0.3, weight_decay=0.1),
    lambda p: torch.optim.Adagrad(p, 1e-2),
]


def trained(kind: Callable[[Any], torch.optim.Optimizer], by: str, *, fused: bool) -> list[Tensor]:
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(6, 4, 3, 3)), torch.nn.Parameter(torch.randn(5, 7))]
    weights[0].data = weights[0].data.contiguous(memory_format=torch.channels_last)
    optimizer, subject = kind(weights), Subject()
    subject.optimizers.add(optimizer)

    def closure() -> float:
        for weight in weights:
            gradient = torch.arange(weight.numel()).view(weight.shape).float().sin()
            weight.grad = gradient if weight.dim() == 4 else gradient.t().contiguous().t()
        return 0.0

    with FusedOptimizer().apply(subject, "fused" if fused else "foreach"):
        for _ in range(3):
            if by == "keyword":
                optimizer.step(closure=closure)
            elif by == "closure":
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
    return [weight.detach() for weight in weights]


@pytest.mark.parametrize("by", ["call", "closure", "keyword"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_that_lie_otherwise_than_their_weights(kind: Any, by: str) -> None:
    torch.testing.assert_close(trained(kind, by, fused=True), trained(kind, by, fused=False), rtol=1e-4, atol=1e-6)


def _loaded(optimizer: torch.optim.Optimizer, weights: list[torch.nn.Parameter]) -> None:
    """A checkpoint whose moments lie as they were when it was saved, not as the weights do now."""
    state = optimizer.state_dict()
    for one in state["state"].values():
        one.update({name: value.contiguous() for name, value in one.items() if isinstance(value, Tensor)})
    optimizer.load_state_dict(state)


def _moment_replaced(optimizer: torch.optim.Optimizer, weights: list[torch.nn.Parameter]) -> None:
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dim() == 4:
                state[name] = value.contiguous()


def _laid_out_anew(optimizer: torch.optim.Optimizer, weights: list[torch.nn.Parameter]) -> None:
    weights[0].data = weights[0].data.contiguous()


def _unfrozen(optimizer: torch.optim.Optimizer, weights: list[torch.nn.Parameter]) -> None:
    weights[2].requires_grad_(True)


def _another_group(optimizer: torch.optim.Optimizer, weights: list[torch.nn.Parameter]) -> None:
    weights.append(torch.nn.Parameter(torch.ones(3, 2).t().contiguous().t()))
    optimizer.add_param_group({"params": [weights[-1]]})


@pytest.mark.parametrize("event", [_loaded, _moment_replaced, _laid_out_anew, _unfrozen, _another_group])
@pytest.mark.parametrize("kind", KINDS)
def test_what_changes_between_steps(kind: Any, event: Any) -> None:
    if event is _another_group and kind is KINDS[2] and torch.__version__ < "2.13":
        pytest.skip("torch's own Adagrad had no state for a group that is added later (KeyError: 'sum' in plain torch)")

    def run(*, fused: bool) -> list[Tensor]:
        torch.manual_seed(0)
        weights = [torch.nn.Parameter(torch.randn(6, 4, 3, 3)), torch.nn.Parameter(torch.tensor(0.5))]
        weights += [torch.nn.Parameter(torch.randn(4, 2), requires_grad=False)]
        weights[0].data = weights[0].data.contiguous(memory_format=torch.channels_last)
        optimizer, subject = kind(weights), Subject()
        subject.optimizers.add(optimizer)
        with FusedOptimizer().apply(subject, "fused" if fused else "foreach"):
            for number in range(5):
                if number == 3:
                    event(optimizer, weights)
                for weight in weights:
                    if weight.requires_grad:
                        weight.grad = torch.arange(weight.numel()).view(weight.shape).float().sin()
                optimizer.step()
        return [weight.detach().contiguous() for weight in weights]

    torch.testing.assert_close(run(fused=True), run(fused=False), rtol=1e-4, atol=1e-6)


SPARSE: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda p: torch.optim.SGD(p, 0.1),
    lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    lambda p: torch.optim.Adagrad(p, 0.1),
]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("kind", SPARSE)
def test_sparse_gradients_are_stepped_as_torch_does_and_reported(kind: Any, in_backward: bool) -> None:
    trained = []
    for plan in (Plan(), Plan(optimizer="fused", optimizer_in_backward=in_backward)):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.EmbeddingBag(20, 8, sparse=True, mode="sum"), torch.nn.Linear(8, 3))
        step = TrainStep(model, kind(model.parameters()), supervised(torch.nn.CrossEntropyLoss()), plan)
        for _ in range(3):
            step((torch.randint(0, 20, (4, 5)), torch.tensor([0, 1, 2, 0])))
        assert step.rolled_back == ([("optimizer", "its gradients are sparse")] if plan.optimizer else [])
        step.close()
        trained.append([one.detach() for one in model.parameters()])
    torch.testing.assert_close(trained[1], trained[0])


def test_a_step_says_where_the_optimizer_stays_as_it_is() -> None:
    def rolled_back(make: Callable[[Any], torch.optim.Optimizer], choice: Any) -> list[tuple[str, str]]:
        model = torch.nn.Linear(4, 3)
        plan = Plan(optimizer=choice)
        return TrainStep(model, make(model.parameters()), supervised(torch.nn.CrossEntropyLoss()), plan).rolled_back

    assert rolled_back(lambda p: torch.optim.Adam(p), "fused") == []
    assert rolled_back(lambda p: torch.optim.Adam(p, fused=True), "fused") == []  # it is so already
    ((name, why),) = rolled_back(lambda p: torch.optim.NAdam(p), "fused")
    assert (name, "NAdam has no fused implementation" in why) == ("optimizer", True)
    ((_, why),) = rolled_back(lambda p: torch.optim.Adam(p, torch.tensor(1e-3)), "foreach")
    assert "Adam has no foreach implementation" in why
    ((_, why),) = rolled_back(lambda p: torch.optim.Adam(p, foreach=False), "fused")
    assert "was built with fused or foreach set" in why


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_fused_sgd_is_not_used_where_it_stores_nothing(dtype: torch.dtype) -> None:
    def trained(plan: Plan) -> tuple[Tensor, TrainStep]:
        torch.manual_seed(0)
        model = torch.nn.Linear(64, 64, dtype=dtype)

        def loss_fn(model: torch.nn.Module, batch: Tensor) -> Tensor:
            loss: Tensor = model(batch).float().square().mean()
            return loss

        step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.5, momentum=0.9), loss_fn, plan)
        for _ in range(3):
            step(torch.randn(8, 64).to(dtype))
        return model.weight.detach(), step

    (plain, _), (planned, step) = trained(Plan()), trained(Plan(optimizer="fused"))
    torch.testing.assert_close(planned, plain)
    lost = types_lost_if_fused([plain])  # which versions of torch store them is theirs to say
    why = "on a CPU torch's fused SGD leaves weights in 16 bits as they are"
    assert [one for _, one in step.rolled_back] == [why] * len(lost)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_step_refuses_a_fused_sgd_that_stores_nothing(dtype: torch.dtype) -> None:
    model = torch.nn.Linear(64, 64, dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.5, fused=True)
    if not types_lost_if_fused(model.parameters()):
        pytest.skip("this torch stores what its fused SGD computes")
    with pytest.raises(UsageError, match=r"an SGD with fused=True, and weights on the CPU are .*float16"):
        TrainStep(model, optimizer, lambda model, batch: model(batch).float().mean())
