"""The Triton kernels against torch's operations: in Triton's interpreter, or on the GPU where there is one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from flatout.kernels import linear_cross_entropy as module
from flatout.kernels.linear_cross_entropy import linear_cross_entropy

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton asks when it is imported, so the tests that need it run in a process of their own."""
STAND_IN = "STAND_IN" in os.environ  # which launches no Triton kernel
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
TRITON = importlib.util.find_spec("triton") is not None
SEED = 20
here = pytest.mark.skipif(
    not TRITON or STAND_IN or not (INTERPRETED or DEVICE == "cuda"), reason="needs Triton and its interpreter or a GPU"
)


@pytest.mark.slow
@pytest.mark.skipif(
    not TRITON or INTERPRETED or STAND_IN, reason="needs Triton, and runs the others in its interpreter"
)
def test_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    done = subprocess.run(command, env={**outside, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout


@pytest.fixture
def several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a row, also with few classes."""
    from flatout.kernels import score_gradients as kernel

    monkeypatch.setattr(kernel, "BLOCK", 16)
    monkeypatch.setattr(kernel, "COLUMNS", 8)
    if INTERPRETED:
        monkeypatch.setattr(module, "_by_triton", lambda hidden: hidden.dtype != torch.float64)


def made(rows: int, classes: int, dtype: torch.dtype, ignored: float) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    hidden = torch.randn(rows, 8, generator=generator).to(dtype)
    weight = torch.randn(classes, 8, generator=generator).to(dtype)
    bias = torch.randn(classes, generator=generator).to(dtype)
    targets = torch.randint(0, classes, (rows,), generator=generator)
    targets[torch.rand(rows, generator=generator) < ignored] = -100
    return [one.to(DEVICE) for one in (hidden, weight, bias, targets)]


def with_gradients(loss: Callable[..., torch.Tensor], tensors: list[torch.Tensor], **how: Any) -> list[torch.Tensor]:
    *leaves, targets = tensors
    leaves = [one.clone().requires_grad_() for one in leaves]
    value = loss(*leaves, targets, **how)
    return [value, *torch.autograd.grad(value * 4, leaves)]


def plain(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, targets: torch.Tensor, **how: Any
) -> torch.Tensor:
    return functional.cross_entropy(functional.linear(hidden, weight, bias), targets, **how)


def ours(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, targets: torch.Tensor, **how: Any
) -> torch.Tensor:
    return linear_cross_entropy(hidden, weight, targets, bias, **how)


@here
@pytest.mark.usefixtures("several_blocks")
@pytest.mark.parametrize(("rows", "classes"), [(1, 1), (1, 37), (7, 16), (7, 37)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_equals_torch_in_float64(rows: int, classes: int, smoothing: float, reduction: Any) -> None:
    tensors = made(rows, classes, torch.float32, ignored=0.3 if rows > 1 else 0.0)
    how = {"label_smoothing": smoothing, "reduction": reduction}
    exact = [one.double() if one.is_floating_point() else one for one in tensors]
    expected = with_gradients(plain, exact, **how)
    for chunk_bytes in (1, 3 * classes * 4, 1 << 20):
        found = with_gradients(ours, tensors, chunk_bytes=chunk_bytes, **how)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=2e-5, atol=2e-6)


@here
@pytest.mark.usefixtures("several_blocks")
def test_without_bias_and_with_frozen_weight() -> None:
    hidden, weight, _, targets = made(9, 33, torch.float32, ignored=0.2)
    hidden.requires_grad_()
    expected = functional.cross_entropy(functional.linear(hidden, weight), targets)
    found = linear_cross_entropy(hidden, weight, targets)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(one, [hidden])[0] for one in (found, expected)))


@here
@pytest.mark.usefixtures("several_blocks")
def test_nothing_to_differentiate() -> None:
    hidden, weight, bias, targets = made(9, 33, torch.float32, ignored=0.2)
    torch.testing.assert_close(ours(hidden, weight, bias, targets), plain(hidden, weight, bias, targets))


@here
@pytest.mark.usefixtures("several_blocks")
def test_no_target_and_no_row() -> None:
    tensors = made(5, 20, torch.float32, ignored=1.1)
    value, *gradients = with_gradients(ours, tensors)
    assert value.isnan()
    assert not any(one.any() for one in gradients)
    empty = [tensors[0][:0], *tensors[1:3], tensors[3][:0]]
    assert with_gradients(ours, empty, reduction="sum")[0] == 0


@here
@pytest.mark.usefixtures("several_blocks")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_further_off_than_torch(dtype: torch.dtype) -> None:
    tensors = made(31, 50, dtype, ignored=0.2)
    exact = with_gradients(plain, [one.double() if one.is_floating_point() else one for one in tensors])
    errors = {
        loss: [
            (one.double() - other).norm() / other.norm()
            for one, other in zip(with_gradients(loss, tensors), exact, strict=True)
        ]
        for loss in (plain, ours)
    }
    for ours_off, torch_off in zip(errors[ours], errors[plain], strict=True):
        assert ours_off <= 1.5 * torch_off + 1e-4


@here
@pytest.mark.usefixtures("several_blocks")
@pytest.mark.parametrize(("rows", "classes"), [(1, 1), (1, 37), (9, 8), (9, 37)])
@pytest.mark.parametrize(("smoothing", "reduction"), [(0.0, "mean"), (0.1, "sum")])
def test_by_classes_in_chunks_of_all_sizes(rows: int, classes: int, smoothing: float, reduction: Any) -> None:
    tensors = made(rows, classes, torch.bfloat16, ignored=0.3 if rows > 1 else 0.0)
    how = {"label_smoothing": smoothing, "reduction": reduction}
    exact = with_gradients(plain, [one.double() if one.is_floating_point() else one for one in tensors], **how)
    for chunk_bytes in (1, 7 * rows * 2, None):
        found = with_gradients(ours, tensors, chunk_bytes=chunk_bytes, **how)
        for one, other in zip(found, exact, strict=True):
            torch.testing.assert_close(
                one.double(), other, rtol=0.05, atol=0.02 * float(other.detach().abs().max()) + 1e-6
            )


@here
@pytest.mark.usefixtures("several_blocks")
def test_by_classes_under_autocast_gives_gradients_in_the_weights_dtype() -> None:
    tensors = made(12, 40, torch.float32, ignored=0.2)
    with torch.autocast(DEVICE, torch.bfloat16):
        found = with_gradients(ours, tensors)
        expected = with_gradients(plain, tensors)
    assert [one.dtype for one in found] == [torch.float32] * 4
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other.float(), rtol=0.05, atol=0.02 * float(other.detach().abs().max()))


@here
@pytest.mark.usefixtures("several_blocks")
def test_by_classes_with_padded_classes_and_frozen_parts() -> None:
    hidden, weight, bias, targets = made(14, 40, torch.bfloat16, ignored=0.2)
    targets = targets.clamp(max=29)
    for wanted in [(True, False, False), (False, True, False), (False, False, True), (True, True, True)]:
        leaves = [one.clone().requires_grad_(how) for one, how in zip((hidden, weight, bias), wanted, strict=True)]
        for count, loss in (
            ("padded", linear_cross_entropy(leaves[0], leaves[1], targets, leaves[2], classes=30, chunk_bytes=300)),
            ("torch", plain(leaves[0], leaves[1][:30], leaves[2][:30], targets)),
        ):
            for one in leaves:
                one.grad = None
            loss.backward()
            gradients = [one.grad for one in leaves]
            if count == "padded":
                first = gradients
        for one, other, how in zip(first, gradients, wanted, strict=True):
            assert (one is None) is not how
            if one is not None and other is not None:
                torch.testing.assert_close(one, other, rtol=0.05, atol=0.02 * float(other.detach().abs().max()))


@here
@pytest.mark.usefixtures("several_blocks")
def test_by_classes_backward_twice_gives_the_same() -> None:
    hidden, weight, bias, targets = made(14, 40, torch.bfloat16, ignored=0.2)
    hidden.requires_grad_()
    weight.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, targets, bias, chunk_bytes=300)
    once = torch.autograd.grad(loss, [hidden, weight], retain_graph=True)
    twice = torch.autograd.grad(loss, [hidden, weight])
    for one, other in zip(once, twice, strict=True):
        assert torch.equal(one, other)
    with torch.no_grad():
        assert torch.equal(linear_cross_entropy(hidden, weight, targets, bias, chunk_bytes=300), loss)


@here
@pytest.mark.usefixtures("several_blocks")
def test_by_classes_no_target_and_no_row() -> None:
    tensors = made(5, 20, torch.bfloat16, ignored=1.1)
    value, *gradients = with_gradients(ours, tensors)
    assert value.isnan()
    assert not any(one.any() for one in gradients)
    empty = [tensors[0][:0], *tensors[1:3], tensors[3][:0]]
    assert with_gradients(ours, empty, reduction="sum")[0] == 0
    assert with_gradients(ours, empty)[0].isnan()


@here
@pytest.mark.usefixtures("several_blocks")
def test_large_scores_do_not_overflow() -> None:
    tensors = made(6, 40, torch.float32, ignored=0.0)
    tensors[0] *= 1e4
    for one, other in zip(with_gradients(ours, tensors), with_gradients(plain, tensors), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@here
@pytest.mark.usefixtures("several_blocks")
def test_classes_that_are_ruled_out_first() -> None:
    hidden, weight, bias, targets = made(7, 37, torch.float32, ignored=0.0)
    bias[:20] = -float("inf")
    targets = 20 + targets % 17
    expected = plain(hidden, weight, bias, targets)
    for chunk_bytes in (1, 1 << 20):
        found = with_gradients(ours, [hidden, weight, bias, targets], chunk_bytes=chunk_bytes)
        torch.testing.assert_close(found[0], expected)
        assert found[1].isfinite().all()
