"""Images in another layout, weights as the script made them: whatever holds, flattens or saves them finds the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from flatout.levers.channels_last import ChannelsLast
from flatout.levers.subject import Subject
from flatout.plan import Plan
from flatout.train.loss import supervised
from flatout.train.step import TrainStep


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inside = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
        self.up = nn.ConvTranspose2d(4, 3, 3)
        self.layouts: list[bool] = []

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = self.inside(x)
        self.layouts.append(features.is_contiguous(memory_format=torch.channels_last))
        return {"image": self.up(features), "class": features.mean((2, 3))}


def steps(model: Net, subject: Subject | None) -> list[Tensor]:
    """Losses, the gradient by the images, and the weights after a few steps."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    torch.manual_seed(1)
    found = []
    for _ in range(3):
        x = torch.randn(2, 3, 12, 12, requires_grad=True)

        def forward(x: Tensor = x) -> dict[str, Tensor]:
            return model(x)

        out = forward() if subject is None else subject.call(model, forward)
        loss = out["image"].view(2, -1).square().mean() + out["class"].sum()
        first = torch.autograd.grad(loss, [x, model.inside[0].weight], create_graph=True)
        (loss + 0.1 * first[0].view(2, -1).norm(2, dim=1).sum() + first[1].view(-1).square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.detach(), first[0].detach()]
    momenta = [state["momentum_buffer"] for state in optimizer.state.values()]
    assert all(one.is_contiguous() for one in [*model.parameters(), *momenta])
    return found + [p.detach() for p in model.parameters()]


def test_numbers_and_layouts() -> None:
    plain, ours, subject = Net(), Net(), Subject()
    expected = steps(plain, None)
    with ChannelsLast().apply(subject, "channels_last"):
        found = steps(ours, subject)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
    assert (plain.layouts, ours.layouts) == ([False] * 3, [True] * 3)


def test_a_buffer_that_parameters_are_views_of_stays_one() -> None:
    model, subject = Net(), Subject()
    parameters = list(model.parameters())
    flat = torch.cat([p.data.reshape(-1) for p in parameters])
    position = 0
    for parameter in parameters:
        parameter.data = flat[position : position + parameter.numel()].view_as(parameter)
        position += parameter.numel()
    with ChannelsLast().apply(subject, "channels_last"):
        steps(model, subject)
        assert torch.equal(flat, nn.utils.parameters_to_vector(parameters))
        assert all(value.is_contiguous() for value in model.state_dict().values())
        with pytest.warns((DeprecationWarning, FutureWarning), match="torch.jit.script"):
            torch.jit.script(model.inside)
    assert torch.equal(flat, torch.cat([p.data.view(-1) for p in parameters]))


def test_torchs_functions_are_in_their_place_again_also_after_an_error() -> None:
    plain, subject = functional.conv2d, Subject()

    def fails() -> None:
        assert functional.conv2d is not plain
        raise ValueError

    with ChannelsLast().apply(subject, "channels_last"), pytest.raises(ValueError):  # noqa: PT011
        subject.call(Net(), fails)
    assert functional.conv2d is plain


class Dropping(nn.Module):
    """Blocks that drop activations, the first of them right behind the images."""

    def __init__(self, *, inplace: bool = False, own: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = (nn.Sequential(nn.Conv2d(4, 4, 3), nn.SiLU(), nn.Dropout(0.5, inplace=inplace)) for _ in range(3))
        self.blocks, self.head, self.own = nn.Sequential(*blocks), nn.Linear(4, 3), own

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) if self.own else block(x)
        return self.head(x.mean((2, 3)))


def gradients(model: nn.Module, plan: Plan) -> list[Tensor]:
    """After one step."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = TrainStep(model, optimizer, supervised(nn.CrossEntropyLoss()), plan)
    torch.manual_seed(1)
    step((torch.randn(4, 4, 12, 12), torch.tensor([0, 1, 2, 0])))
    assert step.rolled_back == []
    step.close()
    return [one.grad for one in model.parameters() if one.grad is not None]


@pytest.mark.parametrize("inplace", [False, True])
def test_the_same_activations_are_dropped(inplace: bool) -> None:
    expected = gradients(Dropping(inplace=inplace), Plan())
    found = gradients(Dropping(inplace=inplace), Plan(memory_format="channels_last"))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", ["block", "selective", "own"])
def test_what_is_checkpointed_is_computed_again_with_the_same_activations_dropped(kind: Any) -> None:
    expected = gradients(Dropping(), Plan())
    by_plan = {} if kind == "own" else {"activation_checkpointing": kind}
    found = gradients(Dropping(own=kind == "own"), Plan(memory_format="channels_last", **by_plan))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


Drawn = Callable[[Tensor], Tensor]
DRAWN: list[Drawn] = [
    lambda y: y + torch.randn_like(y),
    lambda y: y + torch.rand_like(input=y),
    lambda y: y + torch.randint_like(y, 3),
    lambda y: y + torch.empty_like(y).normal_(),
    lambda y: y * torch.ones_like(y).bernoulli_(0.5),
    lambda y: y + torch.zeros_like(y).uniform_(-1, 1),
    lambda y: functional.alpha_dropout(y, 0.5, True),
    lambda y: torch.dropout(y, 0.5, True),
]


class Noisy(nn.Module):
    """Noise between two convolutions; checkpointed, if at all, by torch's reentrant form."""

    def __init__(self, drawn: Drawn, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3)
        self.scale = nn.Parameter(torch.ones(()))
        self.drawn, self.checkpointed = drawn, checkpointed

    def inside(self, x: Tensor) -> Tensor:
        return self.last(self.drawn(self.first(x)))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        inside = torch.utils.checkpoint.checkpoint(self.inside, x, use_reentrant=True) if self.checkpointed else None
        return (self.inside(x) if inside is None else inside).square().mean()


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("drawn", [*DRAWN, lambda y: functional.dropout(y, 0.5)])
def test_noise_is_the_scripts_noise(drawn: Drawn, checkpointed: bool) -> None:
    """It was drawn in the order of NHWC, and in a reentrant checkpoint's second pass in that of NCHW."""
    before, trained = torch.randn_like, []
    for plan in (Plan(), Plan(memory_format="channels_last")):
        model = Noisy(drawn, checkpointed)
        step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), lambda model, x: model(x), plan)
        torch.manual_seed(1)
        step(torch.randn(4, 3, 9, 9))
        step.close()
        trained.append([one.detach() for one in model.parameters()])
    torch.testing.assert_close(trained[1], trained[0], rtol=1e-4, atol=1e-6)
    assert torch.randn_like is before
    assert "normal_" not in vars(Tensor)


def test_a_reentrant_checkpoint_of_nhwc_activations_draws_the_same_noise_again() -> None:
    seen: list[Tensor] = []

    def noisy(x: Tensor) -> Tensor:
        drawn = functional.dropout(x, 0.5) + torch.randn_like(x)
        seen.append(drawn.detach())
        return drawn

    model, before = Noisy(noisy), nn.Conv2d(3, 3, 1)
    whole = nn.Sequential(before, model)
    model.checkpointed = True
    plan = Plan(memory_format="channels_last")
    step = TrainStep(whole, torch.optim.SGD(whole.parameters(), 0.1), lambda model, x: model(x), plan)
    step(torch.randn(4, 3, 9, 9))
    step.close()
    first, again = seen
    torch.testing.assert_close(again, first)
