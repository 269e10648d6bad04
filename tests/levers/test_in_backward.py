"""Updates in backward: the same bits as a step after it, and no two gradients at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import flatout
from flatout.errors import PlanError, UsageError
from flatout.plan import Plan
from flatout.train.step import TrainStep

LOSS = flatout.supervised(nn.CrossEntropyLoss())
BATCH = (torch.randn(4, 8), torch.randint(0, 3, (4,)))
PLAN = Plan(optimizer_in_backward=True)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 3))


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "fused": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_bits(name: str) -> None:
    trained = []
    for plan in (Plan(), PLAN):
        net = model()
        halves = [{"params": net[0].parameters()}, {"params": net[3].parameters(), "lr": 3e-3}]
        optimizer = OPTIMIZERS[name](halves)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        step = TrainStep(net, optimizer, LOSS, plan, scheduler=scheduler)
        for _ in range(5):
            step(BATCH)
        step.close()
        states = (optimizer.state.get(one, {}) for one in net.parameters())
        trained.append([*net.parameters(), *(value for state in states for value in state.values())])
        if plan is PLAN:
            assert all(one.grad is None for one in net.parameters())
    assert len(trained[0]) == len(trained[1])
    assert all(torch.equal(a, b) for a, b in zip(*trained, strict=True))


def test_gradients_are_not_held_together() -> None:
    net = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)), nn.Linear(256, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    batch = (torch.randn(2, 256), torch.randint(0, 3, (2,)))
    plain, freed = (
        flatout.forecast(TrainStep(net, optimizer, LOSS, plan), batch).peak_bytes for plan in (Plan(), PLAN)
    )
    gradients = 8 * 256 * 256 * 4
    assert plain - freed > 0.8 * gradients


def test_what_cannot_be_had_with_it() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(UsageError, match=r"clip_norm is 1\.0"):
        TrainStep(net, optimizer, LOSS, PLAN, clip_norm=1.0)
    for choices in ({"micro_batches": 2}, {"nonfinite": "skip"}, {"precision": "fp16"}):
        with pytest.raises(PlanError, match="optimizer_in_backward is true"):
            Plan(optimizer_in_backward=True, **choices)  # type: ignore[arg-type]


def test_out_of_memory_ends_the_run() -> None:
    net = model()

    def loss_fn(model: Any, batch: Any) -> Any:
        raise torch.OutOfMemoryError("injected")

    step = TrainStep(net, torch.optim.SGD(net.parameters(), lr=0.1), loss_fn, PLAN)
    with pytest.raises(torch.OutOfMemoryError):
        step(BATCH)


def twice(between: Callable[[nn.Module, Any], None]) -> list[list[torch.Tensor]]:
    """The weights after two steps with `between` in the middle, plainly and updated in backward."""
    found = []
    for plan in (Plan(), PLAN):
        net = model()
        net[0].requires_grad_(False)
        optimizer = torch.optim.AdamW(net[3].parameters(), lr=1e-2)
        step = TrainStep(net, optimizer, LOSS, plan)
        step(BATCH)
        between(net, optimizer)
        step(BATCH)
        step.close()
        found.append([one.detach().clone() for one in net.parameters()])
    return found


def loaded_with_another_rate(net: nn.Module, optimizer: Any) -> None:
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = 0.5
    optimizer.load_state_dict(state)


def joined_by_a_layer(net: nn.Module, optimizer: Any) -> None:
    net[0].requires_grad_(True)
    optimizer.add_param_group({"params": net[0].parameters(), "lr": 3e-3})


@pytest.mark.parametrize("between", [loaded_with_another_rate, joined_by_a_layer])
def test_groups_are_those_that_the_optimizer_has_now(between: Callable[[nn.Module, Any], None]) -> None:
    plain, ours = twice(between)
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


class Mine(torch.optim.SGD):
    """An optimizer that may do anything."""


def step_replaced(net: nn.Module) -> Any:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.step = optimizer.step  # type: ignore[method-assign]
    return optimizer


def hook_of_steps(net: nn.Module) -> Any:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def hook_of_a_layer(net: nn.Module) -> Any:
    net[3].register_full_backward_hook(lambda *_: None)
    return torch.optim.SGD(net.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda net: Mine(net.parameters(), lr=0.1), "Mine is not known to update each parameter independently"),
        (step_replaced, "the optimizer's step was replaced"),
        (hook_of_steps, "there are hooks around the optimizer's step"),
        (hook_of_a_layer, "Linear has a backward hook"),
    ],
)
def test_what_may_need_all_gradients_or_look_in_between_is_refused(make: Callable[[nn.Module], Any], why: str) -> None:
    net = model()
    with pytest.raises(UsageError, match=f"optimizer_in_backward is true, and {why}"):
        TrainStep(net, make(net), LOSS, PLAN)
    assert not any(one._post_accumulate_grad_hooks for one in net.parameters())


class Shared(nn.Module):
    """A layer that three checkpoints use: with reentrant ones, its gradient comes in three parts."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.shared, self.last, self.reentrant = (
            nn.Linear(8, 8),
            nn.Linear(8, 8),
            nn.Linear(8, 3),
            reentrant,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(3):
            x = torch.utils.checkpoint.checkpoint(self.shared, x, use_reentrant=self.reentrant)
        return self.last(x)


def test_a_gradient_in_parts_is_not_taken_for_several() -> None:
    trained = []
    for plan in (Plan(), PLAN):
        net = Shared(reentrant=False)
        step = TrainStep(net, torch.optim.AdamW(net.parameters(), 1e-2), LOSS, plan)
        for _ in range(3):
            step(BATCH)
        step.close()
        trained.append(list(net.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*trained, strict=True))
    net = Shared(reentrant=True)
    step = TrainStep(net, torch.optim.AdamW(net.parameters(), 1e-2), LOSS, PLAN)
    with pytest.raises(UsageError, match="got another gradient after its update"):
        step(BATCH)


def test_a_backward_pass_inside_the_loss_is_refused() -> None:
    net = model()

    def loss_fn(model: Any, batch: Any) -> Any:
        loss = LOSS(model, batch)
        net[0].weight.square().sum().backward()  # type: ignore[union-attr,operator]
        return loss

    step = TrainStep(net, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9), loss_fn, PLAN)
    with pytest.raises(UsageError, match=r"shape \[16, 8\] got another gradient"):
        step(BATCH)


def test_a_pass_outside_of_the_step_updates_nothing() -> None:
    """As a GAN's generator trains through its discriminator, before the discriminator's first step too."""
    torch.manual_seed(0)
    ends = []
    for plan in (Plan(), Plan(optimizer_in_backward=True)):
        torch.manual_seed(0)
        judge, maker = nn.Linear(3, 1), nn.Linear(3, 3)
        steps = [
            TrainStep(maker, torch.optim.Adam(maker.parameters()), lambda m, b, j=judge: -j(m(b)).mean(), plan),
            TrainStep(judge, torch.optim.Adam(judge.parameters()), lambda j, b, m=maker: j(m(b).detach()).mean(), plan),
        ]
        losses = [float(step(torch.ones(2, 3))) for _ in range(3) for step in steps]
        ends.append((losses, [*judge.parameters(), *maker.parameters()]))
    assert ends[0][0] == ends[1][0]
    assert all(torch.equal(one, other) for one, other in zip(ends[0][1], ends[1][1], strict=True))
