"""`python -m benchmarks.kernels.batch_norm`: batch norm with the addition and the ReLU after it, beside torch's.

Forward and backward of tensors as in a ResNet-50 at batch 16 and in smaller networks, fp32 and bf16, in both layouts;
ways take turns, a few calls each, in another order every round. Errors are norms of differences from float64, relative
to its norm, the largest of output and gradients; where rounding decides what ReLU lets through, single numbers differ.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.kernels.bf16_products import Case, run
from flatout.kernels.batch_norm import batch_norm, statistics

EPSILON = 1e-5
RESNET_50 = ((16, 64, 112, 112), (16, 256, 56, 56), (16, 128, 28, 28), (16, 2048, 7, 7))
LAYOUTS = (torch.channels_last, torch.contiguous_format)
SMALLER = ((100, 16, 32, 32), (64, 64, 16, 8))


def case(shape: tuple[int, ...], dtype: torch.dtype, layout: torch.memory_format, *, added: bool, relu: bool) -> Case:
    def drawn() -> Tensor:
        return torch.randn(shape).to(dtype).contiguous(memory_format=layout).requires_grad_()

    channels = shape[1]
    inputs = (drawn(), torch.randn(channels, requires_grad=True), torch.randn(channels, requires_grad=True))
    inputs += (drawn(),) if added else ()

    def torchs(x: Tensor, weight: Tensor, bias: Tensor, addend: Tensor | None = None) -> Tensor:
        out = functional.batch_norm(x, None, None, weight, bias, True, 0.1, EPSILON)
        out = out if addend is None else out + addend
        return functional.relu(out, inplace=True) if relu else out

    def ours(x: Tensor, weight: Tensor, bias: Tensor, addend: Tensor | None = None) -> Tensor:
        return batch_norm(x, statistics(x, weight, bias, EPSILON), addend, weight, bias, relu)

    what = "batch norm" + " + addition" * added + " + ReLU" * relu
    last = "channels last" if layout == torch.channels_last else "contiguous"
    sizes = " x ".join(map(str, shape))
    return Case(
        name=f"{what}, {sizes}, {str(dtype).removeprefix('torch.')}, {last}", inputs=inputs, torchs=torchs, ours=ours
    )


def cases() -> Iterator[Case]:
    """Made one at a time: together they would take some GB."""
    torch.manual_seed(0)
    kinds = itertools.product(RESNET_50 + SMALLER, (torch.bfloat16, torch.float32), LAYOUTS)
    for shape, dtype, layout in kinds:
        for added, relu in ((False, False), (False, True), (True, True)):
            yield case(shape, dtype, layout, added=added, relu=relu)


def main(words: Sequence[str] | None = None) -> int:
    return run("batch_norm", __doc__, cases(), words)


if __name__ == "__main__":
    sys.exit(main())
