"""Weight matrices laid out for products with a few rows, which are bound by reading the weights.

Torch's own products of one row reach half of the memory's speed in bf16 and int8. Here 16 rows of a matrix stand side
by side in a panel, so that one vector register holds 16 sums (native_sources/panels.h has the layout in full).

>>> import torch
>>> panels = pack([torch.eye(3)], None, FLOAT)
>>> panels.rows, panels.inputs
(3, 3)
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from flatout.kernels.native import library_or_error
from flatout.precision.quantize import not_finite

PANEL_ROWS = 16
FLOAT, BFLOAT16, INT8, INT4 = range(4)
_GROUPS = {FLOAT: 2, BFLOAT16: 2, INT8: 64, INT4: 32}
"""Format -> what the columns are filled up to a multiple of."""
_BITS = {FLOAT: 32, BFLOAT16: 16, INT8: 8, INT4: 4}
ELEMENTS = {torch.float32: 0, torch.bfloat16: 1}
"""What the kernels read and write, as they number it. A matrix of another dtype is made fp32 before it is packed."""


def pointers(names: str) -> list[tuple[str, type[ctypes.c_void_p]]]:
    """Fields of a C structure."""
    return [(name, ctypes.c_void_p) for name in names.split()]


def whole_numbers(names: str) -> list[tuple[str, type[ctypes.c_int64]]]:
    return [(name, ctypes.c_int64) for name in names.split()]


class WeightStruct(ctypes.Structure):
    """`Weight` of native_sources/panels.h."""

    _fields_ = (*whole_numbers("format rows columns"), *pointers("data scales bias"))


class _PartStruct(ctypes.Structure):
    """`Part` of native_sources/packing.h."""

    _fields_ = (*pointers("data"), *whole_numbers("element rows row_stride column_stride"))


class _PackingStruct(ctypes.Structure):
    """`Packing` of native_sources/packing.h."""

    _fields_ = (
        *pointers("part"),
        *whole_numbers("parts rows columns format filled_columns"),
        *pointers("data scales"),
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


def pack(weights: Sequence[Tensor], bias: Tensor | None, form: int) -> Panels:
    """Floating point matrices [rows, columns], one under the other, and bias [all rows] -> panels of this format.

    Each weight is read once, where it lies: transposed matrices and joined ones are not copied first. Scales are those
    of precision/quantize.py: INT8 one a row; INT4 one for 32 columns, kept in bf16, of which the columns must be a
    whole number. UsageError: INT8 or INT4 of inf or NaN. MachineError where the kernel could not be built.
    """
    sources = [_source(weight) for weight in weights]
    rows, columns = sum(len(one) for one in sources), sources[0].shape[1]
    assert all(one.shape[1] == columns for one in sources), "one under the other"
    assert form != INT4 or columns % _GROUPS[INT4] == 0, "a whole number of groups"
    filled_rows, filled = -(-rows // PANEL_ROWS) * PANEL_ROWS, -(-columns // _GROUPS[form]) * _GROUPS[form]
    data = torch.empty(filled_rows * filled * _BITS[form] // 8, dtype=torch.uint8, device="cpu")
    scales = None
    if form in (INT8, INT4):
        groups = 1 if form == INT8 else filled // _GROUPS[INT4]
        dtype = torch.float32 if form == INT8 else torch.bfloat16
        scales = torch.empty(filled_rows, groups, dtype=dtype, device="cpu")
    parts = (_PartStruct * len(sources))(*(_part(one) for one in sources))
    numbers = (len(sources), rows, columns, form, filled)
    packing = _PackingStruct(ctypes.addressof(parts), *numbers, pointer(data), pointer(scales))
    call = library_or_error().flatout_pack
    call.restype = ctypes.c_int64
    if not call(ctypes.byref(packing), ctypes.c_int64(torch.get_num_threads())):
        raise not_finite(sources)
    return Panels(
        format=form,
        rows=rows,
        columns=filled,
        inputs=columns,
        data=data,
        scales=scales,
        bias=None if bias is None else F.pad(bias.detach().float(), (0, filled_rows - rows)).contiguous(),
    )


def _source(weight: Tensor) -> Tensor:
    found = weight.detach()
    return found if found.dtype in ELEMENTS else found.float()


def _part(source: Tensor) -> _PartStruct:
    return _PartStruct(source.data_ptr(), ELEMENTS[source.dtype], len(source), *source.stride())
