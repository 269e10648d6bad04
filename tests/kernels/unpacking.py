"""What panels stand for, read back from their layout as native_sources/panels.h describes it."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from flatout.kernels.native import library_or_error
from flatout.kernels.panels import BFLOAT16, FLOAT, INT8, PANEL_ROWS, Panels, pointer


def unpacked(panels: Panels) -> Tensor:
    """fp32 [rows, inputs]: the weights that a product is made with."""
    levels = _matrix(panels)
    if panels.format in (FLOAT, BFLOAT16):
        held = levels
    elif panels.format == INT8:
        assert panels.scales is not None
        held = (levels - 128) * panels.scales[:, :1]
    else:
        assert panels.scales is not None
        groups = panels.columns // 32
        scales = panels.scales.flatten().view(-1, groups, PANEL_ROWS).transpose(1, 2).reshape(-1, groups).float()
        held = ((levels - 8).unflatten(1, (-1, 32)) * scales[..., None]).flatten(1)
    return held[: panels.rows, : panels.inputs]


def _matrix(panels: Panels) -> Tensor:
    """fp32 [rows filled up, columns]: what is stored, as numbers."""
    columns = panels.columns
    if panels.format == FLOAT:
        return panels.data.view(torch.float32).view(-1, columns, PANEL_ROWS).transpose(1, 2).flatten(0, 1)
    if panels.format in (BFLOAT16, INT8):
        kind, step = (torch.bfloat16, 2) if panels.format == BFLOAT16 else (torch.uint8, 4)
        lain = panels.data.view(kind).view(-1, columns // step, PANEL_ROWS, step)
        return lain.transpose(1, 2).reshape(-1, columns).float()
    lain = panels.data.view(-1, columns // 8, PANEL_ROWS, 4).transpose(1, 2)
    return torch.stack((lain & 15, lain >> 4), dim=3).reshape(-1, columns).float()


def product(panels: Panels, x: Tensor, threads: int | None = None) -> Tensor:
    """fp32 [n, inputs] -> fp32 [n, rows]: x @ weight.T + bias, by the native kernel alone."""
    x = x.detach().float().contiguous()
    y = torch.empty(x.shape[0], panels.rows, dtype=torch.float32, device="cpu")
    at, whole = ctypes.c_void_p, ctypes.c_int64
    sizes = whole(x.shape[0]), whole(panels.inputs)
    count = whole(threads or torch.get_num_threads())
    library_or_error().flatout_product(ctypes.byref(panels.struct()), at(pointer(x)), *sizes, at(pointer(y)), count)
    return y
