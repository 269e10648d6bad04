"""Models that keep keys and values must not do so where blocks are computed again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from flatout import Plan, TrainStep
from flatout.levers.activation_checkpointing import ActivationCheckpointing
from flatout.script.watch import Watch


class Block(nn.Module):
    """Appends to a cache that its caller gives it, as the attention of Hugging Face's decoders does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Any, cache: list[Any] | None) -> Any:
        x = self.layer(x)
        if cache is None:
            return x.tanh()
        cache.append(x)
        return torch.cat(cache).mean(0).tanh().expand_as(x)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = SimpleNamespace(use_cache=True)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.cached: list[bool] = []

    def forward(self, x: Any) -> Any:
        self.cached.append(self.config.use_cache)
        for block in self.blocks:
            x = block(x, [] if self.config.use_cache else None)
        return x


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def test_the_cache_is_off_in_calls_whose_blocks_are_recomputed_and_on_in_others() -> None:
    model = Decoder()
    plan = Plan(activation_checkpointing="block")
    step = TrainStep(model, torch.optim.SGD(model.parameters()), mean_square, plan)
    assert step(torch.randn(4, 8)).isfinite()
    assert model.config.use_cache
    model(torch.randn(4, 8))
    step.close()
    assert model.cached == [False, True]


def test_a_loss_may_call_parts_of_the_model() -> None:
    """As a loss that is computed from the last layer's inputs does. It is off until the backward pass has ended."""

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = Decoder(), nn.Linear(8, 2)

        def forward(self, x: Any) -> Any:
            return self.head(self.body(x))

    def loss_fn(model: Any, batch: Tensor) -> Tensor:
        hidden = model.body(batch)
        hidden.register_hook(lambda _: seen.append(model.body.config.use_cache))
        return model.head(hidden).square().mean()

    model, seen = Whole(), list[bool]()
    step = TrainStep(model, torch.optim.SGD(model.parameters()), loss_fn, Plan(activation_checkpointing="block"))
    assert step(torch.randn(4, 8)).isfinite()
    assert (model.body.cached, seen) == ([False], [False])
    assert model.body.config.use_cache


def test_it_is_off_in_scripts_too(watch: Watch) -> None:
    model = Decoder()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with ActivationCheckpointing().apply(watch.subject, "block"):
        for _ in range(2):
            optimizer.zero_grad()
            mean_square(model, torch.randn(4, 8)).backward()
            optimizer.step()
        with torch.no_grad():
            model(torch.randn(4, 8))
    assert model.cached[-2:] == [False, True]
    assert model.config.use_cache
