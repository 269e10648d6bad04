"""Weight matrices laid out for products with a few rows, which cost what reading the weights costs.

Torch's own products of one row reach half of the memory's speed in bf16 and int8. Here 16 rows of a matrix stand side
by side in a panel, so that one vector register holds 16 sums (native_sources/panels.h has the layout in full).

>>> import torch
>>> panels = pack_dense(torch.eye(3), None, torch.float32)
>>> product(panels, torch.tensor([[1.0, 2.0, 3.0]]))
tensor([[1., 2., 3.]])
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flatout.errors import MachineError
from flatout.kernels.native import native

PANEL_ROWS = 16
FLOAT, BFLOAT16, INT8, INT4 = range(4)
_GROUPS = {FLOAT: 2, BFLOAT16: 2, INT8: 64, INT4: 32}
"""Format -> what the columns are filled up to a multiple of."""


class WeightStruct(ctypes.Structure):
    """`Weight` of native_sources/panels.h."""

    _fields_ = (
        ("format", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("data", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    )


@dataclass(frozen=True, kw_only=True)
class Panels:
    """One weight matrix [rows, columns] in panels."""

    format: int
    rows: int
    columns: int
    """Filled up with zeros."""
    inputs: int
    """Columns that are real: the width of what it is multiplied with."""
    data: Tensor
    scales: Tensor | None
    bias: Tensor | None
    """fp32 [rows filled up]."""

    @property
    def nbytes(self) -> int:
        """What a product reads of it."""
        return sum(part.nbytes for part in (self.data, self.scales, self.bias) if part is not None)

    def struct(self) -> WeightStruct:
        """As C sees it; valid as long as this value lives."""
        return WeightStruct(
            self.format, self.rows, self.columns, self.data.data_ptr(), pointer(self.scales), pointer(self.bias)
        )


def pointer(tensor: Tensor | None) -> int | None:
    """Where a tensor's data begin; None (a null pointer) for None."""
    return None if tensor is None else tensor.data_ptr()


def pack_dense(weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Panels:
    """Floating point [rows, columns], bias [rows] -> panels of fp32 or bf16."""
    form, step = (BFLOAT16, 2) if dtype == torch.bfloat16 else (FLOAT, 1)
    full = _filled(weight.detach().to(dtype), _GROUPS[form])
    panels, columns = full.shape[0] // PANEL_ROWS, full.shape[1]
    data = full.view(panels, PANEL_ROWS, columns // step, step).transpose(1, 2).contiguous()
    return _panels(form, weight, columns, data, None, bias)


def pack_int8(values: Tensor, scales: Tensor, bias: Tensor | None) -> Panels:
    """int8 [rows, columns], fp32 scales [rows], bias [rows]: weight = value * scale."""
    full = _filled(values.to(torch.int16) + 128, _GROUPS[INT8]).to(torch.uint8)
    panels, columns = full.shape[0] // PANEL_ROWS, full.shape[1]
    data = full.view(panels, PANEL_ROWS, columns // 4, 4).transpose(1, 2).contiguous()
    return _panels(INT8, values, columns, data, _filled_rows(scales), bias)


def pack_int4(values: Tensor, scales: Tensor, bias: Tensor | None) -> Panels:
    """uint8 0..15 [rows, columns], fp32 scales [rows, columns / 32], bias [rows]: weight = (value - 8) * scale.

    Scales are kept in bf16: half a bit more a weight, not a whole one.
    """
    full = _filled(values, _GROUPS[INT4])
    panels, columns = full.shape[0] // PANEL_ROWS, full.shape[1]
    low, high = full.view(panels, PANEL_ROWS, columns // 8, 2, 4).unbind(3)
    data = (low | (high << 4)).transpose(1, 2).contiguous()
    groups = columns // _GROUPS[INT4]
    wide = F.pad(scales.float(), (0, groups - scales.shape[1], 0, full.shape[0] - scales.shape[0]))
    packed = wide.to(torch.bfloat16).view(panels, PANEL_ROWS, groups).transpose(1, 2).contiguous()
    return _panels(INT4, values, columns, data, packed, bias)


def product(panels: Panels, x: Tensor, threads: int | None = None) -> Tensor:
    """fp32 [n, inputs] -> fp32 [n, rows]: x @ weight.T + bias, by the native kernel.

    Raises MachineError where the kernel could not be built.
    """
    library = library_or_error()
    x = x.detach().float().contiguous()
    y = torch.empty(x.shape[0], panels.rows)
    arguments = (x.shape[0], panels.inputs, ctypes.c_void_p(y.data_ptr()), threads or torch.get_num_threads())
    rows, inputs, out, count = arguments
    library.flatout_product(
        ctypes.byref(panels.struct()),
        ctypes.c_void_p(x.data_ptr()),
        ctypes.c_int64(rows),
        ctypes.c_int64(inputs),
        out,
        ctypes.c_int64(count),
    )
    return y


def library_or_error() -> Any:
    """The native library; MachineError with the reason where there is none."""
    found = native()
    if found.library is None:
        remedy = "install a C++ compiler (g++, or set CXX)"
        raise MachineError(f"the native kernels are not there: {found.reason}", remedy=remedy)
    return found.library


def _panels(
    form: int, weight: Tensor, columns: int, data: Tensor, scales: Tensor | None, bias: Tensor | None
) -> Panels:
    return Panels(
        format=form,
        rows=weight.shape[0],
        columns=columns,
        inputs=weight.shape[1],
        data=data,
        scales=scales,
        bias=None if bias is None else _filled_rows(bias),
    )


def _filled(matrix: Tensor, group: int) -> Tensor:
    """[rows, columns] with zeros up to whole panels and groups."""
    rows, columns = matrix.shape
    return F.pad(matrix, (0, -columns % group, 0, -rows % PANEL_ROWS))


def _filled_rows(vector: Tensor) -> Tensor:
    return F.pad(vector.detach().float(), (0, -vector.shape[0] % PANEL_ROWS)).contiguous()
