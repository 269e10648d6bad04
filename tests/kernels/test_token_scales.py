"""Inputs in 8 bits, one scale a token: the native form and torch's agree, and what is not finite is not hidden."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.kernels import token_scales
from flatout.kernels.native import native
from flatout.kernels.token_scales import ZERO_POINT, scale_back, to_levels

HAS_NATIVE = native("token_scales").library is not None


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(1, 70), st.sampled_from([torch.float32, torch.bfloat16]), st.floats(1e-6, 1e6))
def test_native_and_torch_agree(rows: int, width: int, dtype: torch.dtype, size: float) -> None:
    x = (torch.randn(rows, width, generator=torch.Generator().manual_seed(rows * width)) * size).to(dtype)
    levels, scales = to_levels(x)
    expected, expected_scales = token_scales._to_levels_by_torch(x)
    torch.testing.assert_close(scales, expected_scales)
    assert (levels.int() - expected.int()).abs().max() <= 1  # a value half way may go either way
    back = (levels.float() - ZERO_POINT) * scales[:, None]
    assert ((back - x.float()).abs() <= scales[:, None] * 0.502).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [True, False])
def test_scaling_back(dtype: torch.dtype, with_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    y, scales = torch.randn(5, 33).to(dtype), torch.rand(5)
    bias = torch.randn(33) if with_bias else None
    right = y.float() * scales[:, None] + (0 if bias is None else bias)
    found = scale_back(y.clone(), scales, bias)
    assert found.dtype is dtype
    torch.testing.assert_close(found.float(), right, atol=2e-2 if dtype is torch.bfloat16 else 1e-5, rtol=1e-2)
    monkeypatch.setattr(token_scales, "_library", lambda tensor: None)
    torch.testing.assert_close(scale_back(y.clone(), scales, bias).float(), right, atol=2e-2, rtol=1e-2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("by_torch", [False, True])
def test_what_is_not_finite_stays_so(bad: float, by_torch: bool) -> None:
    x = torch.ones(2, 40)
    x[1, 7] = bad
    _, scales = token_scales._to_levels_by_torch(x) if by_torch else to_levels(x)
    assert scales[0].isfinite()
    assert scales[1].isnan()


def test_zeros_are_zeros() -> None:
    levels, scales = to_levels(torch.zeros(2, 16))
    assert (levels == ZERO_POINT).all()
    assert (scales > 0).all()


@pytest.mark.skipif(not HAS_NATIVE, reason="no C++ compiler")
def test_rows_that_are_not_contiguous() -> None:
    x = torch.randn(16, 8).t()
    for found, expected in zip(to_levels(x), to_levels(x.contiguous()), strict=True):
        assert torch.equal(found, expected)
