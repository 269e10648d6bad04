"""The batch norm kernel against float64, in every layout, type and odd shape; in plain C++ too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from flatout.kernels import batch_norm as module
from flatout.kernels.batch_norm import MEAN, VARIANCE, batch_norm, readable, statistics
from flatout.kernels.native import native
from tests.kernels.other_builds import other_builds

FP32, BF16 = torch.float32, torch.bfloat16
LAST, FIRST = "channels last", "contiguous"
EPSILON = 1e-5

pytestmark = pytest.mark.skipif(native("batch_norm").library is None, reason=native("batch_norm").reason)


@pytest.fixture(params=["this processor", "any processor"], scope="module")
def build(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The kernel as it is built here, and in plain C++, as for a processor without vectors of bf16."""
    if request.param == "this processor":
        yield
        return
    with other_builds(("batch_norm",), (module,), tmp_path_factory.mktemp("plain")):
        yield


def laid_out(x: Tensor, layout: str) -> Tensor:
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if layout == LAST else x.contiguous()


def drawn(shape: tuple[int, ...], dtype: torch.dtype, layout: str, far: float = 3.0) -> list[Tensor]:
    """x, addend, weight, bias and the gradient of the result."""
    channels = shape[1]
    means = (far * torch.randn(channels)).reshape(1, -1, *[1] * (len(shape) - 2))
    x, addend, gradient = torch.randn(shape) * 2 + means, torch.randn(shape), torch.randn(shape)
    images = [laid_out(one.to(dtype), layout) for one in (x, addend, gradient)]
    return [images[0], images[1], torch.randn(channels), torch.randn(channels), images[2]]


def ours(x: Tensor, addend: Tensor | None, weight: Tensor | None, bias: Tensor | None, relu: bool) -> Tensor:
    return batch_norm(x, statistics(x, weight, bias, EPSILON), addend, weight, bias, relu)


def exact(x: Tensor, addend: Tensor | None, weight: Tensor | None, bias: Tensor | None, relu: bool) -> Tensor:
    out = functional.batch_norm(x, None, None, weight, bias, True, 0.1, EPSILON)
    out = out if addend is None else out + addend
    return out.relu() if relu else out


def error(found: Tensor, wanted: Tensor) -> float:
    wanted = wanted.detach()
    return float((found.detach().double() - wanted).norm() / wanted.norm().clamp_min(1e-30))


SHAPES = ((4, 32, 6, 6), (3, 10, 7, 5), (2, 7, 3, 3), (5, 24, 9), (64, 5), (40, 96), (2, 3, 4, 5, 6), (2, 130, 3, 11))


@pytest.mark.usefixtures("build")
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("layout", [LAST, FIRST])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("relu", [False, True])
def test_results_and_gradients(dtype: torch.dtype, layout: str, added: bool, relu: bool) -> None:
    for seed, shape in enumerate(SHAPES):
        torch.manual_seed(seed)
        x, addend, weight, bias, gradient = drawn(shape, dtype, layout)
        inputs = [x, addend if added else None, weight, bias]
        ones = [one if one is None else one.requires_grad_() for one in inputs]
        doubles = [one if one is None else one.detach().double().requires_grad_() for one in inputs]
        out, wanted = ours(*ones, relu), exact(*doubles, relu)
        # Where a sum is next to 0, rounding decides whether ReLU lets a gradient pass: none there.
        gradient = torch.where(wanted.abs() < 0.05, 0.0, gradient.double()).to(dtype)
        found = torch.autograd.grad(out, [one for one in ones if one is not None], laid_out(gradient, layout))
        right = torch.autograd.grad(wanted, [one for one in doubles if one is not None], gradient.double())
        limit = 3e-6 if dtype == FP32 else 4e-3
        assert out.dtype == dtype
        assert out.stride() == wanted.stride()  # that of torch
        assert error(out, wanted) < limit, (shape, error(out, wanted))
        for one, by in zip(found, right, strict=True):
            assert error(one, by) < 2 * limit, (shape, one.shape, error(one, by))


@pytest.mark.usefixtures("build")
@pytest.mark.parametrize("layout", [LAST, FIRST])
def test_statistics_of_channels_far_from_zero(layout: str) -> None:
    torch.manual_seed(0)
    x = laid_out(torch.randn(6, 9, 20, 20) + torch.logspace(-2, 5, 9).reshape(1, -1, 1, 1), layout)
    found = statistics(x, None, None, EPSILON)
    variance, mean = torch.var_mean(x.double(), dim=(0, 2, 3), correction=0)
    torch.testing.assert_close(found[MEAN].double(), mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found[VARIANCE].double(), variance, rtol=2e-5, atol=0)


@pytest.mark.usefixtures("build")
@pytest.mark.parametrize("layout", [LAST, FIRST])
def test_constant_channels_have_no_variance(layout: str) -> None:
    x = laid_out(torch.full((4, 3, 5, 5), 7.25), layout)
    assert not statistics(x, None, None, EPSILON)[VARIANCE].any()
    assert not ours(x, None, None, None, False).any()


@pytest.mark.usefixtures("build")
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("layout", [LAST, FIRST])
def test_what_is_not_finite_is_seen(layout: str, value: float) -> None:
    torch.manual_seed(0)
    x = laid_out(torch.randn(4, 33, 5, 7), layout).requires_grad_()
    with torch.no_grad():
        x[2, 32, 4, 6] = value
    out = ours(x, None, None, None, True)
    assert out[:, 32].isnan().all()
    assert out[:, :32].isfinite().all()
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert gradient[:, 32].isnan().all()
    assert gradient[:, :32].isfinite().all()


@pytest.mark.parametrize("layout", [LAST, FIRST])
def test_threads_change_no_bit(layout: str) -> None:
    torch.manual_seed(0)
    x, addend, weight, bias, gradient = drawn((8, 48, 23, 19), BF16, layout)
    before = torch.get_num_threads()
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        inputs = [one.clone().requires_grad_() for one in (x, addend, weight, bias)]
        out = ours(*inputs, True)
        found.append([out, *torch.autograd.grad(out, inputs, gradient)])
    torch.set_num_threads(before)
    for others in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], others, strict=True))


def test_other_layouts_are_copied() -> None:
    torch.manual_seed(0)
    x, addend, weight, bias, gradient = drawn((4, 12, 6, 10), FP32, LAST)
    sliced = torch.randn(4, 12, 12, 10)[:, :, ::2].requires_grad_()
    assert not readable(sliced)
    for one in (sliced, x.requires_grad_()):
        out = ours(one, addend.contiguous(), weight, bias, True)
        (found,) = torch.autograd.grad(out, one, gradient.contiguous())
        double = one.detach().double().requires_grad_()
        wanted = exact(double, addend.double(), weight.double(), bias.double(), True)
        (right,) = torch.autograd.grad(wanted, double, gradient.double())
        assert error(out, wanted) < 3e-6
        assert error(found, right) < 1e-5


def test_only_wanted_gradients() -> None:
    torch.manual_seed(0)
    x, addend, weight, bias, _ = drawn((4, 12, 6, 10), FP32, LAST)
    for wanted in ((x,), (addend,), (weight,), (bias,), (addend, bias)):
        for one in (x, addend, weight, bias):
            one.requires_grad_(any(one is other for other in wanted))
        out = ours(x, addend, weight, bias, True)
        out.sum().backward()
        assert all((one.grad is not None) is one.requires_grad for one in (x, addend, weight, bias))
        for one in (x, addend, weight, bias):
            one.grad = None


def test_nothing_to_normalise() -> None:
    x = torch.empty(0, 4, 3, 3, requires_grad=True)
    weight = torch.ones(4, requires_grad=True)
    out = ours(x, None, weight, None, True)
    assert out.shape == x.shape
    out.sum().backward()
    assert weight.grad is not None
    assert not weight.grad.any()


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch 2.15's own, in opcheck
def test_registered_as_torch_expects() -> None:
    torch.manual_seed(0)
    operators: Any = torch.ops.flatout
    for layout in (LAST, FIRST):
        x, addend, weight, bias, gradient = drawn((4, 12, 6, 10), FP32, layout)
        found = statistics(x, weight, bias, EPSILON)
        torch.library.opcheck(operators.batch_norm_statistics, (x, weight, bias, EPSILON))
        inputs = (x.requires_grad_(), found, addend.requires_grad_(), weight, bias, True)
        torch.library.opcheck(operators.batch_norm, inputs)
        torch.library.opcheck(operators.batch_norm_gradients, (gradient, x.detach(), found, None, True, True, False))


@pytest.mark.slow
def test_compiled_without_a_break() -> None:
    x, addend, weight, bias, _ = drawn((4, 12, 6, 10), FP32, LAST)
    found = statistics(x, weight, bias, EPSILON)

    def call(x: Tensor, addend: Tensor) -> Tensor:
        return batch_norm(x * 1, found, addend, weight, bias, True) + 1

    compiled = torch.compile(call, fullgraph=True)
    torch.testing.assert_close(compiled(x, addend), call(x, addend))


@pytest.mark.usefixtures("build")
@pytest.mark.parametrize("layout", [LAST, FIRST])
def test_the_variance_of_images_with_bright_corners(layout: str) -> None:
    x = torch.full((16, 2, 16, 16), 0.1)
    x[:, :, 0, 0] = 1234.567
    found = statistics(laid_out(x, layout), None, None, EPSILON)[1]
    wanted = x.double().var(dim=(0, 2, 3), unbiased=False)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=0)
