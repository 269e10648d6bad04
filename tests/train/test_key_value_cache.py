"""Models that keep keys and values must not do so where blocks are computed again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from flatout import Plan, TrainStep


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
        self.config = SimpleNamespace(use_cache=True)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x, [] if self.config.use_cache else None)
        return x


def test_the_cache_is_off_while_blocks_are_recomputed_and_on_again_after() -> None:
    model = Decoder()
    step = TrainStep(
        model,
        torch.optim.SGD(model.parameters()),
        lambda model, batch: model(batch).square().mean(),
        Plan(activation_checkpointing="block"),
    )
    assert not model.config.use_cache
    assert step(torch.randn(4, 8)).isfinite()
    step.close()
    assert model.config.use_cache
