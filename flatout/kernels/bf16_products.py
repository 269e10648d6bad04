"""Matrix products in bf16 on a processor that has instructions for them, by the C++ of native_sources/linear.cpp.

Those are Intel's matrix units (AMX), or dot products of bf16 pairs on vectors (AVX-512 bf16: AMD since Zen 4).

Under autocast torch casts the weights to bf16 in every step, lays them out once more for each product, and casts the
gradients back. Here fp32 is cast while it is laid out, and gradients of weights are written in fp32.

On other processors the same code runs without such instructions: right, and slow. `obstacle` says what a caller should
know before it chooses these products.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from flatout.kernels.native import library_or_error, native
from flatout.kernels.panels import ELEMENTS as ELEMENTS
from flatout.kernels.panels import pointer, pointers, whole_numbers
from flatout.machine.detect import detect


class SideStruct(ctypes.Structure):
    """`Side` of native_sources/bf16_products.h."""

    _fields_ = (*pointers("data"), *whole_numbers("element side inner sides inners"))


class _ProductStruct(ctypes.Structure):
    """`Product` of native_sources/linear.cpp."""

    _fields_ = (
        ("left", SideStruct),
        ("right", SideStruct),
        *pointers("out"),
        *whole_numbers("out_element out_stride"),
        *pointers("bias"),
        *whole_numbers("threads"),
    )


@functools.cache
def has_matrix_units() -> bool:
    """Has this processor AMX, and not only dot products on vectors?"""
    return "amx_bf16" in detect().cpu.features


@functools.cache
def obstacle(library: str = "linear") -> str | None:
    """Why this library, that of products by default, has no instructions for products of bf16 here; None if it has."""
    if not detect().cpu.multiplies_bf16:
        return "this processor has no products of bf16 (AVX-512 bf16 or AMX)"
    found = native(library)
    if found.library is None:
        return f"the kernel is not available: {found.reason}"
    if has_matrix_units() and not found.library.flatout_has_matrix_units():
        return "the system does not let programs use the processor's matrix units"
    return None


def readable(tensor: Tensor) -> bool:
    """Can the kernels read this matrix where it lies? fp32 or bf16 on the CPU, rows or columns contiguous."""
    return tensor.dtype in ELEMENTS and tensor.ndim == 2 and tensor.device.type == "cpu" and 1 in tensor.stride()


def left_side(matrix: Tensor) -> SideStruct:
    """[rows, inner] as the left side of a product; valid as long as the tensor lives."""
    return SideStruct(matrix.data_ptr(), ELEMENTS[matrix.dtype], *matrix.stride(), *matrix.shape)


def right_side(matrix: Tensor) -> SideStruct:
    """[inner, columns] as the right side of a product."""
    return left_side(matrix.T)


def product(left: Tensor, right: Tensor, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """left [rows, inner] @ right [inner, columns] + bias [columns] -> [rows, columns] in fp32 or bf16.

    Both sides, fp32 or bf16, are rounded to bf16; products are summed up in fp32. A result does not depend on the
    number of threads. MachineError where the kernel could not be built.
    """
    left, right = (one if readable(one) else one.contiguous() for one in (left, right))
    bias = None if bias is None else bias.float().contiguous()  # it may be expanded, or a column
    out = torch.empty(left.shape[0], right.shape[1], dtype=dtype, device="cpu")
    if not left.shape[1]:
        return out.zero_() if bias is None else out.copy_(bias)
    if out.numel():
        job = _ProductStruct(
            left_side(left),
            right_side(right),
            out.data_ptr(),
            ELEMENTS[dtype],
            out.stride(0),
            pointer(bias),
            torch.get_num_threads(),
        )
        library_or_error("linear").flatout_matrix_product(ctypes.byref(job))
    return out


def sums_of_columns(matrix: Tensor) -> Tensor:
    """fp32 or bf16 [rows, columns] -> fp32 [columns], summed up in fp32."""
    matrix = matrix if readable(matrix) and matrix.stride(1) == 1 else matrix.contiguous()
    out = torch.empty(matrix.shape[1], dtype=torch.float32, device="cpu")
    side, threads = left_side(matrix), ctypes.c_int64(torch.get_num_threads())
    library_or_error("linear").flatout_add_rows(ctypes.byref(side), ctypes.c_void_p(pointer(out)), threads)
    return out
