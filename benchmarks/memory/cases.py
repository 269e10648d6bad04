"""What is forecast and measured: a model, a batch of any size, a loss, an optimizer and a plan.

Weights are random and sizes small, so that a case takes seconds; widths and lengths are odd on purpose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from flatout import Plan, supervised

Parameters = Iterator[nn.Parameter]
OPTIMIZERS: dict[str, Callable[[Parameters], torch.optim.Optimizer]] = {
    "adam": lambda parameters: torch.optim.Adam(parameters, 1e-4),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 1e-4),
    "momentum": lambda parameters: torch.optim.SGD(parameters, 1e-3, momentum=0.9),
    "sgd": lambda parameters: torch.optim.SGD(parameters, 1e-3),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, 1e-3),
}


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model and its data: `make()` gives the model, `batch(samples)` what `loss_fn` takes beside it."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss_fn: Callable[[Any, Any], Any]
    sizes: tuple[int, int]
    """Two batch sizes."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One subject under one setting."""

    subject: Subject
    optimizer: str
    choices: dict[str, Any] = field(default_factory=dict)
    """Of the plan."""
    held_out: bool = False
    """Was it left alone while the rules were made?"""

    @property
    def name(self) -> str:
        settings = " ".join(
            value if isinstance(value, str) else f"{name} {value}" for name, value in self.choices.items()
        )
        return f"{self.subject.name}, {settings or 'fp32'}, {self.optimizer}"

    def plan(self) -> Plan:
        return Plan(**self.choices)

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.optimizer](model.parameters())


def cases_of(subject: Subject, *settings: tuple[str, dict[str, Any]], held_out: bool = False) -> list[Case]:
    return [
        Case(subject=subject, optimizer=optimizer, choices=choices, held_out=held_out)
        for optimizer, choices in settings
    ]


def classify(*shape: int, classes: int) -> tuple[Callable[[int], Any], Callable[[Any, Any], Any]]:
    """Batches of random values of that shape with a class each, and their loss."""

    def batch(samples: int) -> Any:
        return torch.randn(samples, *shape), torch.randint(classes, (samples,))

    return batch, supervised(nn.CrossEntropyLoss())


def next_token(vocabulary: int, length: int) -> tuple[Callable[[int], Any], Callable[[Any, Any], Any]]:
    """Batches of token numbers with a target each, and their loss."""

    def batch(samples: int) -> Any:
        return torch.randint(vocabulary, (samples, length)), torch.randint(vocabulary, (samples, length))

    return batch, supervised(nn.CrossEntropyLoss())


BF16: dict[str, Any] = {"precision": "bf16"}
BLOCK: dict[str, Any] = {"activation_checkpointing": "block"}
SELECTIVE: dict[str, Any] = {"activation_checkpointing": "selective"}


def parts(count: int) -> dict[str, Any]:
    return {"micro_batches": count}
