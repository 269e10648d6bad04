"""Kernels with products of bf16 against float64, in every layout, type and odd shape; on processors without
instructions for such products too, where the same code runs without them."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from flatout.errors import UsageError
from flatout.kernels import bf16_products, linear_loss, operators
from flatout.kernels import linear_cross_entropy as loss_module
from flatout.kernels.linear_cross_entropy import linear_cross_entropy
from flatout.kernels.native import SOURCES, native
from flatout.kernels.operators import attention, gelu_tanh, linear, packed_attention
from flatout.machine.detect import detect
from tests.kernels.other_builds import other_builds

FP32, BF16 = torch.float32, torch.bfloat16
LIBRARIES = ("linear", "linear_loss", "matrix_attention", "activation")
OPERATORS: Any = torch.ops.flatout

pytestmark = pytest.mark.skipif(native("linear").library is None, reason=native("linear").reason)


@pytest.fixture(params=["this processor", "vectors of bf16", "any processor"], scope="module")
def build(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The kernels as they are built here, as they would be without matrix units, and in plain C++."""
    if request.param == "this processor":
        yield
        return
    flags: tuple[str, ...] = ()
    if request.param == "vectors of bf16":
        if not {"amx_bf16", "avx512_bf16"} <= {*detect().cpu.features}:
            pytest.skip("this processor has no vectors of bf16, or nothing but those")
        flags = ("-march=native", "-mno-amx-tile", "-mno-amx-bf16")
    modules = (bf16_products, linear_loss, operators)
    with other_builds(LIBRARIES, modules, tmp_path_factory.mktemp("built"), flags):
        yield


def exact(tensor: Tensor) -> Tensor:
    """Rounded to bf16, as the kernels do; float64."""
    return tensor.detach().to(BF16).double().requires_grad_(tensor.is_floating_point())


def assert_close(found: Tensor | None, expected: Tensor | None, dtype: torch.dtype, name: str) -> None:
    """Within rounding of `dtype`, relative to the largest."""
    assert found is not None, name
    assert expected is not None, name
    assert found.shape == expected.shape, name
    if not expected.numel():
        return
    largest = expected.abs().max().item()
    error = (found.double() - expected).abs().max().item()
    assert error <= (2e-2 if dtype == BF16 else 3e-3) * largest + 1e-5, (name, error, largest)


SHAPES = [(1, 1, 1), (32, 32, 32), (33, 65, 31), (5, 200, 7), (64, 3, 96), (100, 70, 130), (0, 8, 8), (2, 300, 40)]


@pytest.mark.usefixtures("build")
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
@pytest.mark.parametrize("types", list(itertools.product([FP32, BF16], repeat=2)))
@pytest.mark.parametrize("columns_first", [False, True])
def test_a_linear_layer(
    rows: int, inputs: int, outputs: int, types: tuple[torch.dtype, torch.dtype], columns_first: bool
) -> None:
    torch.manual_seed(rows + inputs)
    x_type, weight_type = types
    x = torch.randn(inputs, rows).t() if columns_first else torch.randn(rows, inputs)
    weight = torch.randn(inputs, outputs).t() if columns_first else torch.randn(outputs, inputs)
    x, weight = x.to(x_type).requires_grad_(), weight.to(weight_type).requires_grad_()
    bias = torch.randn(outputs, requires_grad=True) if rows % 2 else None
    found = linear(x, weight, bias)
    assert found.dtype == x_type
    x64, weight64 = exact(x), exact(weight)
    bias64 = None if bias is None else bias.detach().double().requires_grad_()
    expected = functional.linear(x64, weight64, bias64)
    assert_close(found, expected, x_type, "output")
    gradient = torch.randn(found.shape).to(x_type)
    found.backward(gradient)
    expected.backward(exact(gradient).detach())
    assert_close(x.grad, x64.grad, x_type, "gradient of x")
    assert_close(weight.grad, weight64.grad, weight_type, "gradient of the weight")
    if bias is not None and bias64 is not None:
        assert_close(bias.grad, bias64.grad, FP32, "gradient of the bias")


def test_a_bias_may_be_a_column_or_one_number_expanded() -> None:
    x, weight = torch.randn(9, 16), torch.randn(40, 16)
    for bias in (torch.randn(40, 3)[:, 1], torch.randn(1).expand(40)):
        assert torch.equal(linear(x, weight, bias), linear(x, weight, bias.clone()))


def test_a_mask_that_was_changed_before_the_backward_pass_is_noticed() -> None:
    q, k, v = (torch.randn(1, 1, 9, 16).to(BF16).requires_grad_() for _ in range(3))
    mask = torch.zeros(1, 1, 9, 9)
    found = attention(q, k, v, mask)
    mask.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.sum().backward()


def test_threads_change_no_bit() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(70, 500), torch.randn(300, 500)
    before = torch.get_num_threads()
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        try:
            found.append(linear(x, weight))
        finally:
            torch.set_num_threads(before)
    assert all(torch.equal(found[0], one) for one in found)


def test_inf_and_nan_stay() -> None:
    x = torch.ones(4, 64)
    x[1, 3], x[2, 5] = torch.inf, torch.nan
    found = linear(x, torch.ones(40, 64))
    assert torch.isinf(found[1]).all()
    assert torch.isnan(found[2]).all()
    assert torch.isfinite(found[[0, 3]]).all()


ATTENTIONS = [
    # batch, heads, queries, keys, features, features of values, causal, mask
    (1, 1, 1, 1, 1, 1, False, None),
    (1, 1, 5, 5, 8, 8, True, None),
    (2, 3, 40, 40, 64, 64, True, None),
    (1, 2, 300, 300, 32, 32, True, None),
    (1, 2, 70, 70, 64, 64, False, None),
    (1, 2, 33, 70, 24, 40, False, None),
    (1, 1, 20, 50, 16, 16, True, None),
    (1, 1, 50, 20, 16, 16, True, None),
    (2, 3, 50, 50, 32, 32, False, "padding"),
    (2, 3, 50, 50, 32, 32, False, "added"),
]


@pytest.mark.usefixtures("build")
@pytest.mark.parametrize("case", ATTENTIONS, ids=str)
@pytest.mark.parametrize("tokens_first", [False, True])
def test_attention(case: tuple[Any, ...], tokens_first: bool) -> None:
    batch, heads, queries, keys, features, value_features, causal, kind = case
    torch.manual_seed(queries)

    def made(tokens: int, width: int) -> Tensor:
        if tokens_first:
            return torch.randn(batch, tokens, heads, width).to(BF16).transpose(1, 2).requires_grad_()
        return torch.randn(batch, heads, tokens, width).to(BF16).requires_grad_()

    q, k, v = made(queries, features), made(keys, features), made(keys, value_features)
    mask = None
    if kind == "padding":
        mask = torch.rand(batch, 1, 1, keys) > 0.3
        mask[..., 0] = True
    elif kind == "added":
        mask = torch.randn(1, heads, queries, keys)
    q64, k64, v64 = exact(q), exact(k), exact(v)
    added = mask.double() if mask is not None and mask.dtype == FP32 else mask
    expected = functional.scaled_dot_product_attention(q64, k64, v64, added, is_causal=causal)
    found = attention(q, k, v, mask, causal=causal)
    assert_close(found, expected, BF16, "output")
    gradient = torch.randn(found.shape).to(BF16)
    found.backward(gradient)
    expected.backward(gradient.double())
    if keys > 1:  # of one key, the weights are all 1
        assert_close(q.grad, q64.grad, BF16, "gradient of the queries")
        assert_close(k.grad, k64.grad, BF16, "gradient of the keys")
    assert_close(v.grad, v64.grad, BF16, "gradient of the values")


@pytest.mark.usefixtures("build")
@pytest.mark.parametrize("lengths", [[1], [5, 1, 33, 64, 20], [100, 7, 40], [129]], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("behind", [0, 6])
@pytest.mark.parametrize("tokens_first", [False, True])
def test_attention_within_sequences_of_one_row(
    lengths: list[int], causal: bool, behind: int, tokens_first: bool
) -> None:
    tokens = sum(lengths) + behind
    torch.manual_seed(tokens)

    def made(width: int) -> Tensor:
        shape = (1, tokens, 3, width) if tokens_first else (1, 3, tokens, width)
        found = torch.randn(shape).to(BF16)
        return found.transpose(1, 2) if tokens_first else found

    parts = made(40), made(40), made(24)
    found = packed_attention(*parts, lengths, causal=causal)
    for start, length in zip([0, *itertools.accumulate(lengths)], lengths, strict=False):
        q, k, v = (exact(part[:, :, start : start + length]) for part in parts)
        expected = functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        assert_close(found[:, :, start : start + length], expected, BF16, f"sequence of {length} tokens")
    assert not found[:, :, sum(lengths) :].any()


def test_sequences_longer_than_their_row_are_refused() -> None:
    parts = (torch.randn(1, 2, 9, 16).to(BF16) for _ in range(3))
    with pytest.raises(UsageError, match="the lengths sum up to 10; the row has 9 tokens"):
        packed_attention(*parts, [4, 6])


def test_attention_within_sequences_has_no_gradient() -> None:
    q, k, v = (torch.randn(1, 2, 9, 16).to(BF16).requires_grad_() for _ in range(3))
    with pytest.raises(UsageError, match="packed_attention has no gradient"):
        packed_attention(q, k, v, [4, 5]).sum().backward()


def test_a_query_that_may_attend_to_nothing_gets_zeros() -> None:
    q, k, v = (torch.randn(1, 1, 40, 16).to(BF16).requires_grad_() for _ in range(3))
    mask = torch.ones(1, 1, 40, 40, dtype=torch.bool)
    mask[..., 7, :] = False
    found = attention(q, k, v, mask)
    found.backward(torch.ones_like(found))
    assert not found[..., 7, :].any()
    for one in (q, k, v):
        assert one.grad is not None
        assert torch.isfinite(one.grad).all()
    assert q.grad is not None
    assert not q.grad[..., 7, :].any()


@pytest.mark.usefixtures("build")
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("shape", [(0,), (1,), (31,), (5, 7, 33), (4096,), (9001,)])
def test_gelu(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = (torch.randn(shape) * 4).to(dtype).requires_grad_()
    x64 = x.detach().double().requires_grad_()
    found, expected = gelu_tanh(x), functional.gelu(x64, approximate="tanh")
    tolerance = {"rtol": 1e-2, "atol": 1e-3} if dtype == BF16 else {"rtol": 1e-5, "atol": 3e-6}
    torch.testing.assert_close(found.double(), expected, **tolerance)
    found.sum().backward()
    expected.sum().backward()
    assert x.grad is not None
    assert x64.grad is not None
    torch.testing.assert_close(x.grad.double(), x64.grad, **tolerance)


@pytest.mark.usefixtures("build")
def test_gelu_of_extremes() -> None:
    x = torch.tensor([1e4, -1e4, 3e38, -100.0, 0.0, -0.0, torch.nan]).requires_grad_()
    found = gelu_tanh(x)
    found.backward(torch.ones_like(x))
    assert found[:6].tolist() == pytest.approx([1e4, 0, 3e38, 0, 0, 0], rel=1e-6, abs=1e-30)
    assert torch.isnan(found[6])
    assert x.grad is not None
    assert x.grad[:6].tolist() == pytest.approx([1, 0, 1, 0, 0.5, 0.5], abs=1e-30)


@pytest.fixture
def by_bf16_kernels(build: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chunked loss takes this way, whether or not the processor has matrix units."""
    monkeypatch.setattr(bf16_products, "obstacle", lambda: None)


@pytest.mark.usefixtures("by_bf16_kernels")
@pytest.mark.parametrize(("rows", "width", "classes"), [(1, 1, 2), (3, 5, 7), (40, 70, 100), (70, 33, 1333)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weight_type", [FP32, BF16])
@pytest.mark.parametrize("padding", [0, 5])
def test_the_loss(
    rows: int, width: int, classes: int, smoothing: float, weight_type: torch.dtype, padding: int
) -> None:
    torch.manual_seed(rows)
    hidden = torch.randn(rows, width).to(BF16).requires_grad_()
    weight = torch.randn(classes + padding, width).to(weight_type).requires_grad_()
    bias = torch.randn(classes + padding, requires_grad=True) if rows % 2 else None
    targets = torch.randint(0, classes, (rows,))
    targets[1::3] = -100
    how: Any = {"label_smoothing": smoothing, "reduction": "mean" if padding else "sum"}
    found = linear_cross_entropy(hidden, weight, targets, bias, classes=classes, **how)
    assert "LinearCrossEntropy" in type(found.grad_fn).__name__
    hidden64, weight64 = exact(hidden), exact(weight)
    bias64 = None if bias is None else bias.detach().double().requires_grad_()
    scores = functional.linear(hidden64, weight64, bias64)[:, :classes]
    expected = functional.cross_entropy(scores, targets, **how)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
    found.backward()
    expected.backward()
    assert_close(hidden.grad, hidden64.grad, BF16, "gradient of the inputs")
    assert_close(weight.grad, weight64.grad, BF16, "gradient of the weights")
    if bias is not None and bias64 is not None:
        assert_close(bias.grad, bias64.grad, BF16, "gradient of the bias")


@pytest.mark.slow
def test_the_loss_of_more_rows_than_exponentials_are_kept_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 34,000 classes, 64 MiB hold the exponentials of 960 rows."""
    monkeypatch.setattr(bf16_products, "obstacle", lambda: None)
    torch.manual_seed(0)
    hidden, weight = torch.randn(1000, 16).to(BF16).requires_grad_(), torch.randn(34000, 16, requires_grad=True)
    bias, targets = torch.randn(34000, requires_grad=True), torch.randint(0, 34000, (1000,))
    targets[::7] = -100
    found = linear_cross_entropy(hidden, weight, targets, bias)
    ours = torch.autograd.grad(found, (hidden, weight, bias))
    exacts = (exact(hidden), exact(weight), bias.detach().double().requires_grad_())
    expected = functional.cross_entropy(functional.linear(*exacts), targets)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
    for one, wanted in zip(ours, torch.autograd.grad(expected, exacts), strict=True):
        assert_close(one, wanted, BF16, str(tuple(one.shape)))


@pytest.mark.usefixtures("by_bf16_kernels")
@pytest.mark.parametrize("target", [-1, 7, 2**40])
def test_a_target_that_is_no_class(target: int) -> None:
    from flatout.errors import UsageError

    hidden, weight = torch.randn(4, 8).to(BF16), torch.randn(7, 8)
    with pytest.raises(UsageError, match=rf"a target is class {target}"):
        linear_cross_entropy(hidden, weight.to(BF16), torch.tensor([0, 1, target, 2]))


@pytest.mark.usefixtures("by_bf16_kernels")
def test_the_loss_without_targets_and_with_frozen_weights() -> None:
    hidden = torch.randn(40, 16).to(BF16).requires_grad_()
    weight = torch.randn(50, 16).to(BF16)
    targets = torch.full((40,), -100)
    loss = linear_cross_entropy(hidden, weight, targets)
    loss.backward()
    assert torch.isnan(loss)
    assert hidden.grad is not None
    assert not hidden.grad.any()
    assert linear_cross_entropy(hidden, weight, targets, reduction="sum").item() == 0


@pytest.mark.usefixtures("by_bf16_kernels")
def test_classes_that_are_ruled_out_do_not_make_the_loss_undefined() -> None:
    """By a bias of -inf, of all classes that are looked at first."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(40, 33).to(BF16).requires_grad_(), torch.randn(9000, 33).to(BF16).requires_grad_()
    bias = torch.zeros(9000)
    bias[:8000] = -math.inf
    targets = torch.randint(8000, 9000, (40,))
    found = linear_cross_entropy(hidden, weight, targets, bias)
    expected = functional.cross_entropy(functional.linear(exact(hidden), exact(weight), bias.double()), targets)
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-3)
    found.backward()
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()


@pytest.mark.usefixtures("by_bf16_kernels")
@pytest.mark.first_case
def test_fewer_threads_than_asked_for_add_up_what_they_have(build: None) -> None:
    """OpenMP may give fewer, and sums of an earlier call lie where the others would have been."""
    program = """
import torch
from torch.nn import functional
from flatout.kernels import bf16_products
from flatout.kernels.linear_cross_entropy import linear_cross_entropy
bf16_products.obstacle = lambda: None
torch.set_num_threads(4)
torch.manual_seed(0)
weight, targets = torch.randn(3000, 64).bfloat16(), torch.randint(0, 3000, (96,))
for _ in range(3):
    hidden = torch.randn(96, 64).bfloat16().requires_grad_()
    linear_cross_entropy(hidden, weight, targets).backward()
    exact = hidden.detach().double().requires_grad_()
    functional.cross_entropy(functional.linear(exact, weight.double()), targets).backward()
    assert (hidden.grad.double() - exact.grad).norm() < 0.02 * exact.grad.norm()
"""
    environment = {**os.environ, "OMP_THREAD_LIMIT": "2"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_classes_of_the_loss_are_checked() -> None:
    from flatout.errors import UsageError

    for classes in (0, 8, True, 2.0):
        with pytest.raises(UsageError, match="classes is"):
            linear_cross_entropy(
                torch.randn(4, 8), torch.randn(7, 8), torch.zeros(4, dtype=torch.int64), classes=classes
            )  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch 2.15's own, in opcheck
def test_torch_finds_the_operators_sound() -> None:
    x, weight, bias = torch.randn(9, 16), torch.randn(12, 16), torch.randn(12)
    q, k, v = (torch.randn(1, 2, 9, 16).to(BF16) for _ in range(3))
    for operator, arguments in (
        (OPERATORS.linear.default, (x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_())),
        (OPERATORS.linear.default, (x, weight, None)),
        (OPERATORS.gelu_tanh.default, (torch.randn(40, requires_grad=True),)),
        (OPERATORS.packed_attention.default, (q.detach(), k.detach(), v.detach(), [4, 3], True, 0.25)),
        (OPERATORS.attention.default, (*(one.requires_grad_() for one in (q, k, v)), None, True, 0.25)),
    ):
        torch.library.opcheck(operator, arguments, atol=2e-2, rtol=2e-2)


def test_compiled_code_contains_them_without_a_break() -> None:
    weight, bias = torch.randn(64, 32, requires_grad=True), torch.randn(64, requires_grad=True)

    def model(x: Tensor) -> Tensor:
        y = gelu_tanh(linear(x, weight, bias))
        heads = y.to(BF16).view(1, 2, -1, 32)
        return attention(heads, heads, heads, causal=True).float().sum()

    x = torch.randn(20, 32, requires_grad=True)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))
    (found,) = torch.autograd.grad(compiled(x), [weight])
    (expected,) = torch.autograd.grad(model(x), [weight])
    torch.testing.assert_close(found, expected)


def test_operations_are_counted_as_of_torchs_own() -> None:
    x, weight = torch.randn(20, 32, requires_grad=True), torch.randn(64, 32, requires_grad=True)
    heads = torch.randn(1, 2, 20, 16).to(BF16).requires_grad_()

    def count(layer: Any, mix: Any) -> int:
        with FlopCounterMode(display=False) as counter:
            layer(x, weight).sum().backward()
            mix(heads, heads, heads)
        return counter.get_total_flops()

    theirs = count(functional.linear, lambda q, k, v: (q @ k.transpose(-1, -2)) @ v)
    assert count(linear, attention) == theirs
    with FlopCounterMode(display=False) as counter:
        packed_attention(heads.detach(), heads.detach(), heads.detach(), [20])
    with FlopCounterMode(display=False) as alone:
        attention(heads.detach(), heads.detach(), heads.detach())
    assert counter.get_total_flops() == alone.get_total_flops()


def test_the_loss_keeps_torchs_way_where_there_are_no_products_of_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bf16_products, "obstacle", lambda: "none here")
    called: list[object] = []
    monkeypatch.setattr(loss_module._Terms, "_run_by_bf16_kernels", lambda *_: called.append(1))
    linear_cross_entropy(torch.randn(4, 8).to(BF16), torch.randn(7, 8).to(BF16), torch.zeros(4, dtype=torch.int64))
    assert not called


def test_every_source_is_in_the_wheel() -> None:
    assert {Path(f"{name}.cpp") for name in LIBRARIES} <= {Path(one.name) for one in SOURCES.iterdir()}
