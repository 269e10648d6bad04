"""Modules for the export tests: what can be exported, what cannot, and what must not be believed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)


@dataclass
class Scores:
    scores: Tensor
    best: Tensor
    unused: Tensor | None = None


class Both(NamedTuple):
    first: Tensor
    second: Tensor


class Outputs(Linear):
    """`kind` of output; two of its three inputs by name, one of them a constant."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.drop = kind, nn.Dropout(0.5)

    def forward(self, x: Tensor, scale: float = 2.0, mask: Tensor | None = None) -> Any:
        y = self.drop(self.linear(x)) * scale
        if mask is not None:
            y = y * mask[:, None]
        kinds: dict[str, Any] = {
            "dict": {"y": y, "nested": (y + 1, y.sum(1))},
            "tuple": (y, None, y.argmax(1)),
            "dataclass": Scores(y, y.argmax(1)),
            "named tuple": Both(y, y.sum(1)),
            "with an object": {"y": y, "name": "scores"},
            "with a size": {"y": y, "shape": torch.Size([1, 2])},
        }
        return kinds[self.kind]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(30, 4)
        self.head = nn.Linear(4, 30, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, attention_mask: Tensor) -> Tensor:
        return self.head(self.tokens(tokens) * attention_mask[..., None])


class Branch(Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if y.sum() > 0:  # the line of Branch
            return y + 1
        return y - 1


class Item(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * int(x.sum().item())  # the line of Item


class Numpy(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.from_numpy(np.tanh(x.detach().numpy())))  # the line of Numpy


class Thing:
    def __init__(self, value: Tensor) -> None:
        self.value = value


class ReturnsThing(Linear):
    def forward(self, x: Tensor) -> Thing:
        return Thing(self.linear(x))


class Counter(Linear):
    """A trace holds the count of the moment."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.seen = 0, [0]

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.seen.append(self.count)
        return self.linear(x) * self.count


class CountingBuffer(Linear):
    """The same count in a buffer is part of the program."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.linear(x) * self.count


class Random(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + torch.randn_like(x)


class FixedReshape(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).reshape(3, 2, 2)


class OverSamples(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.linear(sample) for sample in x])


class Writes(Linear):
    """Into its own input."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mul_(2))


class OneLength(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x.transpose(1, 2))
