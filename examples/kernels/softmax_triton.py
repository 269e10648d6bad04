"""Softmax of rows in Triton, with a gradient: `flatout kernel check examples/kernels/softmax_triton.py`.

Without a GPU the kernel is run by Triton's interpreter: the check is the same, its time says nothing.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _softmax_rows(source, target, width, row_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(source + row * row_stride + columns, mask=inside, other=float("-inf")).to(tl.float32)
    grown = tl.exp(x - tl.max(x, axis=0))  # without the maximum, exp overflows above 88
    y = grown / tl.sum(grown, axis=0)
    tl.store(target + row * width + columns, y.to(target.dtype.element_ty), mask=inside)


@torch.library.custom_op("example_softmax::softmax", mutates_args=())
def softmax(x: Tensor) -> Tensor:
    rows, width = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()  # rows may be apart, their elements may not
    y = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if y.numel():
        _softmax_rows[(rows,)](x, y, width, x.stride(0), BLOCK=triton.next_power_of_2(width))
    return y


@softmax.register_fake
def _shape(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(output)


def _backward(ctx, grad: Tensor) -> Tensor:
    (saved,) = ctx.saved_tensors
    y, grad = saved.float(), grad.float()  # in 16 bits, what cancels here would be lost
    return (y * (grad - (grad * y).sum(1, keepdim=True))).to(saved.dtype)


softmax.register_autograd(_backward, setup_context=_save)


# what is checked

kernel = softmax


def reference(x: Tensor) -> Tensor:
    return torch.softmax(x, dim=1)


inputs = ("float[rows, width]",)
gradient = compiles = True
sizes = {"width": range(1, 4097)}
# Triton's interpreter truncates where a GPU rounds, which costs bfloat16 one of its eight bits.
dtypes = ("float32", "bfloat16", "float16") if torch.cuda.is_available() else ("float32", "float16")
