"""RMSNorm in C++ (rms_norm.cpp), with a gradient: `flatout kernel check examples/kernels/rms_norm.py`."""

from pathlib import Path

import torch
from torch import Tensor

import flatout

EPS = 1e-5

ops = flatout.kernels.load(Path(__file__).with_name("rms_norm.cpp"))


@torch.library.register_fake("example_norm::rms_norm")
def _shape(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.register_fake("example_norm::rms_norm_backward")
def _shapes(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(weight)


def _save(ctx, inputs, output) -> None:
    x, weight, ctx.eps = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    of_x, of_weight = ops.rms_norm_backward(grad, *ctx.saved_tensors, ctx.eps)
    return of_x, of_weight, None


torch.library.register_autograd("example_norm::rms_norm", _backward, setup_context=_save)


# what is checked


def kernel(x: Tensor, weight: Tensor) -> Tensor:
    return ops.rms_norm(x, weight, EPS)


def reference(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x, weight.shape, weight, EPS)


inputs = ("float[rows, width]", "float[width]")
gradient = compiles = True
timing = {"rows": 4096, "width": 1024}
