"""Weights in 8 and 4 bits: how near they come, and what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.errors import UsageError
from flatout.precision.quantize import quantize_groups_int4, quantize_rows_int8
from tests.precision.dequantized import dequantize_groups_int4, dequantize_rows_int8


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(1, 70), st.floats(1e-6, 1e6), st.integers(0, 2**31))
def test_int8_is_within_half_a_step(outputs: int, inputs: int, size: float, seed: int) -> None:
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)) * size
    values, scales = quantize_rows_int8(weight)
    assert values.dtype is torch.int8
    assert scales.shape == (outputs,)
    assert scales.dtype is torch.float32
    error = (dequantize_rows_int8(values, scales) - weight).abs()
    assert (error <= scales[:, None] * 0.501).all()


def test_int4_beats_the_plain_scale() -> None:
    """Against the widest symmetric scale without a search; normal weights, groups of 32."""
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    values, scales = quantize_groups_int4(weight)
    assert values.dtype is torch.uint8
    assert int(values.max()) <= 15
    assert scales.shape == (64, 8)
    found = (dequantize_groups_int4(values, scales) - weight).square().mean()
    groups = weight.view(64, 8, 32)
    plain = groups.abs().amax(-1, keepdim=True) / 7
    naive = ((groups / plain).round().clamp(-8, 7) * plain - groups).square().mean()
    assert found < 0.75 * naive


def test_int4_is_exact_where_it_can_be() -> None:
    levels = torch.randint(-8, 8, (5, 64), generator=torch.Generator().manual_seed(1)).float()
    levels[:, ::32] = -8
    values, scales = quantize_groups_int4(levels * 0.25)
    torch.testing.assert_close(dequantize_groups_int4(values, scales), levels * 0.25)


def test_parts_of_a_large_weight_agree_with_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(33, 64, generator=torch.Generator().manual_seed(2))
    whole = quantize_groups_int4(weight)
    monkeypatch.setattr("flatout.precision.quantize._ROWS_AT_ONCE", 256)
    for a, b in zip(whole, quantize_groups_int4(weight), strict=True):
        assert torch.equal(a, b)


def test_zeros_and_tiny_weights_stay_finite() -> None:
    weight = torch.zeros(3, 32)
    weight[1, 0], weight[2] = 1e-44, 1e-30
    for values, scales, back in (
        (*(pair := quantize_rows_int8(weight)), dequantize_rows_int8(*pair)),
        (*(pair := quantize_groups_int4(weight)), dequantize_groups_int4(*pair)),
    ):
        assert scales.isfinite().all()
        torch.testing.assert_close(back, weight, atol=1e-31, rtol=0)
        assert values.shape == weight.shape


def test_reduced_precision_weights_are_taken() -> None:
    weight = torch.randn(4, 32).bfloat16()
    torch.testing.assert_close(dequantize_rows_int8(*quantize_rows_int8(weight)), weight.float(), atol=0.03, rtol=0)


@pytest.mark.parametrize(
    ("weight", "complaint"),
    [
        (torch.zeros(3), "floating point"),
        (torch.zeros(3, 32, dtype=torch.int8), "torch.int8"),
        (torch.full((2, 32), float("nan")), "64 of 64 weights are inf or NaN"),
    ],
)
def test_refused(weight: torch.Tensor, complaint: str) -> None:
    for quantize in (quantize_rows_int8, quantize_groups_int4):
        with pytest.raises(UsageError, match=complaint):
            quantize(weight)


def test_int4_needs_whole_groups() -> None:
    with pytest.raises(UsageError, match=r"\[2, 33\], its groups 32; .* 8 bits"):
        quantize_groups_int4(torch.zeros(2, 33))
