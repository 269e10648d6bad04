"""Inputs of a linear layer in 8 bits, one scale a token, and outputs scaled back; each in one pass over memory.

The native form is built on first use; without a compiler, and off the CPU, torch's operations do the same in seven
passes. A row with inf or NaN has a scale of NaN, so its outputs are NaN, as they would be in floating point.

>>> import torch
>>> levels, scales = to_levels(torch.tensor([[1.0, -2.0]]))
>>> levels.tolist(), scales.shape
([[192, 1]], torch.Size([1]))
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from flatout.kernels.native import native

ZERO_POINT = 128
_SMALLEST = 1e-30
_NAMES = {torch.float32: "f32", torch.bfloat16: "bf16"}


def to_levels(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Floating point [tokens, width] -> uint8 [tokens, width], 128 + round(value / scale), and fp32 scales [tokens]."""
    library = _library(rows)
    if library is None:
        return _to_levels_by_torch(rows)
    rows = rows.contiguous()
    levels = torch.empty(rows.shape, dtype=torch.uint8, device="cpu")
    scales = torch.empty(rows.shape[0], dtype=torch.float32, device="cpu")
    call = getattr(library, f"to_levels_{_NAMES[rows.dtype]}")
    call(_at(rows), _whole(rows.shape[0]), _whole(rows.shape[1]), _at(levels), _at(scales), _threads())
    return levels, scales


def scale_back(y: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """y [tokens, outputs] * scales [tokens] + bias fp32 [outputs], in place where it can be; y's dtype."""
    library = _library(y)
    if library is None or not y.is_contiguous():
        column = scales[:, None].to(y.dtype)
        return y * column if bias is None else torch.addcmul(bias.to(y.dtype), y, column)
    call = getattr(library, f"scale_back_{_NAMES[y.dtype]}")
    call(_at(y), _whole(y.shape[0]), _whole(y.shape[1]), _at(scales), None if bias is None else _at(bias), _threads())
    return y


def _to_levels_by_torch(rows: Tensor) -> tuple[Tensor, Tensor]:
    values = rows.float()
    scales = values.abs().amax(dim=1).div_(127).clamp_(min=_SMALLEST)
    scales = scales + values.mul(0).sum(dim=1)
    levels = torch.round(values / scales[:, None]).nan_to_num_(0.0).clamp_(-127, 127)
    return levels.add_(ZERO_POINT).to(torch.uint8), scales


def _library(tensor: Tensor) -> ctypes.CDLL | None:
    """The native form, if it can take this tensor."""
    if tensor.device.type != "cpu" or tensor.dtype not in _NAMES:
        return None
    return native("token_scales").library


def _at(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _whole(value: int) -> ctypes.c_int64:
    return ctypes.c_int64(value)


def _threads() -> ctypes.c_int64:
    """Those of torch, whose OpenMP is not this library's."""
    return _whole(torch.get_num_threads())
