"""Gradients of the kernels' gradients are refused: torch's fallback would return zeros."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flatout.errors import UsageError
from flatout.kernels.batch_norm import batch_norm, statistics
from flatout.kernels.linear_cross_entropy import linear_cross_entropy
from flatout.kernels.native import native
from flatout.kernels.operators import attention, gelu_tanh, linear
from flatout.levers.lazy_norm import form, lazy_norm

pytestmark = pytest.mark.skipif(native("linear").library is None, reason=native("linear").reason)


def normalised(x: Tensor, weight: Tensor) -> Tensor:
    return batch_norm(x, statistics(x, weight[0], None, 1e-5), None, weight[0], None, True)


def formed(x: Tensor, weight: Tensor) -> Tensor:
    return form(lazy_norm(x, weight[0], None, statistics(x, weight[0], None, 1e-5)))


def attended(x: Tensor, weight: Tensor) -> Tensor:
    heads = x[None, None].bfloat16()
    return attention(heads, heads, heads).float()


CALLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": linear,
    "attention": attended,
    "gelu": lambda x, weight: gelu_tanh(x) @ weight.t(),
    "batch norm": normalised,
    "batch norm, deferred": formed,
    "loss": lambda x, weight: linear_cross_entropy(x, weight, torch.arange(len(x)) % len(weight)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_gradient_of_a_gradient_is_refused(name: str) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(6, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True)
    (slope,) = torch.autograd.grad(CALLS[name](x, weight).square().sum(), x, create_graph=True)
    with pytest.raises(UsageError, match="can be differentiated once"):
        slope.square().sum().backward()


@pytest.mark.parametrize("name", CALLS)
def test_of_what_comes_last_too(name: str) -> None:
    """The gradient from above is a constant there. What only asks for x and weight has to meet the error as well."""
    torch.manual_seed(0)
    x, weight = torch.randn(6, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True)
    (slope,) = torch.autograd.grad(CALLS[name](x, weight).sum(), x, create_graph=True)
    for one in (x, weight) if name == "loss" else (x,):
        with pytest.raises(UsageError, match="can be differentiated once"):
            torch.autograd.grad(slope.square().sum(), one, retain_graph=True, allow_unused=True)


@pytest.mark.parametrize("name", CALLS)
def test_a_graph_that_nobody_differentiates_is_fine(name: str) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(6, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True)
    (kept,) = torch.autograd.grad(CALLS[name](x, weight).square().sum(), x, create_graph=True)
    (plain,) = torch.autograd.grad(CALLS[name](x, weight).square().sum(), x)
    assert torch.equal(kept, plain)
