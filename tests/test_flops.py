"""Known counts. A multiply-add is 2 operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flatout.flops import count_step
from flatout.profiling.following import OperatorFollower


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


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=["coo", "csr"])
@pytest.mark.parametrize("multiply", [torch.mm, torch.sparse.mm], ids=["mm", "sparse.mm"])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_of_a_sparse_matrix_only_what_is_stored_is_multiplied(layout: torch.layout, multiply: Any) -> None:
    """As a graph network multiplies by its adjacency."""
    places, stored = torch.tensor([[0, 5, 9, 70], [3, 3, 8, 99]]), 4
    matrix = torch.sparse_coo_tensor(places, torch.ones(stored), (100, 100), is_coalesced=True).to_sparse(layout=layout)
    x = torch.randn(100, 7, requires_grad=True)
    forward = 2 * stored * 7
    assert flops(lambda: multiply(matrix, x)) == forward
    assert flops(lambda: multiply(matrix, x).sum().backward()) == 2 * forward
    with OperatorFollower() as follower:
        multiply(matrix, x.detach())
    assert sum(one.flops or 0.0 for one in follower.operators) == forward
    (product,) = [one for one in follower.operators if one.flops]
    assert product.size_bytes < 3 * 100 * 7 * 4 + 2000  # not the 40 kB of a dense matrix


def test_products_that_torch_does_not_count() -> None:
    a, b = torch.randn(2, 3, 4), torch.randn(2, 4, 5)
    assert flops(lambda: torch.addbmm(torch.randn(3, 5), a, b)) == 2 * 2 * 3 * 4 * 5
    small = torch.ones(32, 32, dtype=torch.int8)
    assert flops(lambda: torch._int_mm(small, small)) == 2 * 32**3


def test_counting_leaves_a_gradient_penalty_alone() -> None:
    """The gradient of a module's own input, which the hooks of torch's counter do not allow."""
    critic, x = torch.nn.Linear(5, 7, bias=False), torch.randn(3, 5, requires_grad=True)

    def step() -> None:
        (gradient,) = torch.autograd.grad(critic(x).pow(2).sum(), x, create_graph=True)
        gradient.norm().backward()

    assert flops(step) == 2 * 3 * 5 * 7 * 6


def test_a_bilinear_layer() -> None:
    layer, x, y = torch.nn.Bilinear(5, 6, 7, bias=False), torch.randn(3, 5), torch.randn(3, 6)
    forward = 2 * 3 * 7 * (5 * 6 + 6)
    assert flops(lambda: layer(x, y)) == forward
    assert flops(lambda: layer(x, y).sum().backward()) > forward


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_layer_that_torch_runs_as_one_operation(padded: bool) -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 2, 40, batch_first=True).eval()
    encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=True).eval()
    x, lengths = torch.randn(3, 8, 16), [8, 5, 2] if padded else [8, 8, 8]
    mask = torch.arange(8) >= torch.tensor(lengths)[:, None] if padded else None
    expected = 2 * sum(2 * n * (4 * 16 * 16 + 2 * 16 * 40) + 4 * n * n * 16 for n in lengths)
    with torch.no_grad():
        assert flops(lambda: encoder(x, src_key_padding_mask=mask)) == expected


def test_attention_that_torch_runs_as_one_operation() -> None:
    attention, x = torch.nn.MultiheadAttention(16, 2, batch_first=True).eval(), torch.randn(3, 8, 16)
    with torch.no_grad():
        assert flops(lambda: attention(x, x, x, need_weights=False)) == 3 * (2 * 8 * 4 * 16 * 16 + 4 * 8 * 8 * 16)
