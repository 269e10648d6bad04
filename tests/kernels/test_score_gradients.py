"""The Triton kernel against torch's operations: in Triton's interpreter, or on the GPU where there is one."""

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


@pytest.mark.skipif(not TRITON or INTERPRETED, reason="needs Triton, and is what runs the others in its interpreter")
def test_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout


@pytest.fixture
def several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a row, also with few classes."""
    from flatout.kernels import score_gradients as kernel

    monkeypatch.setattr(kernel, "BLOCK", 16)
    if INTERPRETED:
        monkeypatch.setattr(module, "_in_one_launch", lambda hidden: hidden.dtype != torch.float64)


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
@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("classes", [1, 16, 37])
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
def test_large_scores_do_not_overflow() -> None:
    tensors = made(6, 40, torch.float32, ignored=0.0)
    tensors[0] *= 1e4
    for one, other in zip(with_gradients(ours, tensors), with_gradients(plain, tensors), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
