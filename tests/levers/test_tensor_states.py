"""Optimizers of a script that keep a tensor for each parameter, and no dict of them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from flatout.levers.low_bit import copied_codes
from flatout.levers.moved_to_device import MovedToDevice
from flatout.levers.subject import Subject


class Sum(torch.optim.Optimizer):
    """Adds up what it was given."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = self.state.get(parameter, 0) + parameter.grad
            parameter -= 0.1 * self.state[parameter]


def trained() -> Sum:
    model = nn.Linear(3, 2)
    optimizer = Sum(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return optimizer


def test_it_is_moved() -> None:
    optimizer = trained()
    before = [one.clone() for one in optimizer.state.values()]
    subject = Subject()
    with MovedToDevice().apply(subject, "cpu"):
        subject.optimizers.add(optimizer)  # a script's, which steps for the first time
        optimizer.step()
    assert [one.tolist() for one in optimizer.state.values()] == [(2 * one).tolist() for one in before]


def test_it_is_copied() -> None:
    optimizer = trained()
    copied = copy.deepcopy(optimizer, dict(copied_codes(optimizer)))
    for one, other in zip(optimizer.state.values(), copied.state.values(), strict=True):
        assert torch.equal(one, other)
