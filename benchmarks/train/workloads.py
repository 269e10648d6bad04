"""The workloads: the guides' MLP, a small ConvNet, a small GPT; data generated, the same for everybody."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, kw_only=True)
class Workload:
    """`model()` is made anew for each contender; batches are (inputs, targets)."""

    name: str
    model: Callable[[], nn.Module]
    inputs: torch.Tensor
    targets: torch.Tensor
    batch_size: int

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), 1e-3)

    def loss(self, scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(scores.flatten(0, -2), targets.flatten())


class Block(nn.Module):
    """A pre-norm Transformer block; [batch, tokens, width] in and out."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.first, self.second, self.heads = nn.LayerNorm(width), nn.LayerNorm(width), heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.first(x)).chunk(3, -1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.second(x))


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))


def _convnet() -> nn.Module:
    def stage(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]

    return nn.Sequential(*stage(3, 32), *stage(32, 64), nn.Flatten(), nn.Linear(64 * 64, 10))


def _gpt() -> nn.Module:
    class Gpt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(96, 128), nn.Embedding(64, 128)
            self.blocks = nn.ModuleList(Block(128, 4) for _ in range(4))
            self.norm, self.head = nn.LayerNorm(128), nn.Linear(128, 96)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    return Gpt()


def workloads() -> list[Workload]:
    torch.manual_seed(0)
    text = torch.randint(0, 96, (1024, 65))
    return [
        Workload(
            name="MLP 784-256-10, batch 64",
            model=_mlp,
            inputs=torch.randn(12_800, 784),
            targets=torch.randint(0, 10, (12_800,)),
            batch_size=64,
        ),
        Workload(
            name="ConvNet 32x32, batch 64",
            model=_convnet,
            inputs=torch.randn(1_280, 3, 32, 32),
            targets=torch.randint(0, 10, (1_280,)),
            batch_size=64,
        ),
        Workload(
            name="GPT 4 x 128, 64 tokens, batch 16",
            model=_gpt,
            inputs=text[:, :-1].contiguous(),
            targets=text[:, 1:].contiguous(),
            batch_size=16,
        ),
    ]
