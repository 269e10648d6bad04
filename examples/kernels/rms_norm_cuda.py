"""RMSNorm in CUDA (rms_norm.cu), for inference: `flatout kernel check examples/kernels/rms_norm_cuda.py`.

It needs a GPU, a CUDA build of torch and nvcc of the same CUDA version; the check says which of them is missing.
"""

from pathlib import Path

import torch
from torch import Tensor

import flatout

EPS = 1e-5

ops = flatout.kernels.load(Path(__file__).with_name("rms_norm.cu"))


@torch.library.register_fake("example_cuda_norm::rms_norm")
def _shape(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


# what is checked


def kernel(x: Tensor, weight: Tensor) -> Tensor:
    return ops.rms_norm(x, weight, EPS)


def reference(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x, weight.shape, weight, EPS)


inputs = ("float[rows, width]", "float[width]")
gradient = False
compiles = True
timing = {"rows": 8192, "width": 4096}
