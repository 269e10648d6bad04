"""What quantized weights stand for, in fp32 [out, in]."""

from __future__ import annotations

from torch import Tensor


def dequantize_rows_int8(values: Tensor, scales: Tensor) -> Tensor:
    """Of quantize_rows_int8."""
    return values.float() * scales[:, None]


def dequantize_groups_int4(values: Tensor, scales: Tensor) -> Tensor:
    """Of quantize_groups_int4."""
    groups = values.view(values.shape[0], scales.shape[1], -1).float() - 8
    return (groups * scales[..., None]).view(values.shape)
