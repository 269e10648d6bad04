"""Known counts. A multiply-add is 2 operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flatout.train.flops import count_step


def flops(work: Callable[[], Any]) -> float:
    finish = count_step()
    work()
    return finish()


def test_linear_forward_and_backward() -> None:
    layer, x = torch.nn.Linear(5, 7, bias=False), torch.randn(3, 5)
    forward = 2 * 3 * 5 * 7
    assert flops(lambda: layer(x)) == forward
    assert flops(lambda: layer(x).sum().backward()) == 2 * forward  # the first layer needs no gradient of its input


def test_convolution() -> None:
    layer, x = torch.nn.Conv2d(3, 4, 3, bias=False), torch.randn(2, 3, 6, 6, requires_grad=True)
    forward = 2 * 2 * 4 * 4 * 4 * (3 * 9)
    assert flops(lambda: layer(x)) == forward
    assert flops(lambda: layer(x).sum().backward()) == 3 * forward


@pytest.mark.parametrize("transposed", [False, True])
def test_convolution_in_groups(transposed: bool) -> None:
    kind = torch.nn.ConvTranspose2d if transposed else torch.nn.Conv2d
    layer, x = kind(4, 8, 3, groups=2, bias=False), torch.randn(2, 4, 6, 6, requires_grad=True)
    forward = 2 * 2 * (36 if transposed else 16) * (8 * 2 * 9)
    assert flops(lambda: layer(x)) == forward
    assert flops(lambda: layer(x).sum().backward()) == 3 * forward
    layer.weight.requires_grad_(False)
    assert flops(lambda: layer(x).sum().backward()) == 2 * forward


@pytest.mark.parametrize("directions", [1, 2])
def test_lstm(directions: int) -> None:
    layer, x = torch.nn.LSTM(5, 7, bidirectional=directions == 2), torch.randn(3, 4, 5)
    forward = directions * 2 * 12 * (28 * 5 + 28 * 7)
    assert flops(lambda: layer(x)) == forward
    assert flops(lambda: layer(x)[0].sum().backward()) == 3 * forward


def test_attention() -> None:
    q, k, v = (torch.randn(2, 4, 8, 16, requires_grad=True) for _ in range(3))
    forward = 2 * (2 * 2 * 4 * 8 * 8 * 16)
    attend = torch.nn.functional.scaled_dot_product_attention
    assert flops(lambda: attend(q, k, v)) == forward
    assert flops(lambda: attend(q, k, v).sum().backward()) == 3.5 * forward
