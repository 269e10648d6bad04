"""Cross-entropy of a linear layer's scores on the CPU, with products in bf16 and all gradients.

The scores are computed twice, once for the losses and once for the gradients, and are never in memory
(native_sources/linear_loss.cpp). `flatout.linear_cross_entropy` is the public way to it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from flatout.kernels.bf16_products import SideStruct, left_side, readable, right_side
from flatout.kernels.native import library_or_error
from flatout.kernels.panels import pointer, pointers, whole_numbers

IGNORED = torch.iinfo(torch.int64).min
"""A target that counts for nothing."""

_DEFINITIONS = torch.library.Library("flatout", "FRAGMENT")
_DEFINITIONS.define(
    "linear_loss(Tensor hidden, Tensor weight, Tensor? bias, Tensor targets, float smoothing, Tensor scale,"
    " bool[3] wanted, int rows) -> Tensor[]"
)


class _LossStruct(ctypes.Structure):
    """`Loss` of native_sources/linear_loss.cpp."""

    _fields_ = (
        ("hidden", SideStruct),
        ("weight", SideStruct),
        *pointers("bias targets"),
        ("smoothing", ctypes.c_float),
        ("scale", ctypes.c_float),
        *pointers("losses of_hidden of_weight of_bias"),
        *whole_numbers("threads"),
    )


linear_loss: Callable[..., list[Tensor]] = torch.ops.flatout.linear_loss
"""(hidden, weight, bias, targets, smoothing, scale, wanted, rows) -> losses [rows], then the gradients of hidden,
weight and bias that are wanted, times `scale`, one number; all in fp32.

hidden: [rows, width] and weight: [classes, width], in fp32 or bf16, rounded to bf16; bias: [classes]; targets: int64
[rows], classes or IGNORED. Gradients of weight and bias have `rows` rows, zeros beyond the classes. Raises IndexError
for a target that is neither.
"""


@torch.library.impl(_DEFINITIONS, "linear_loss", "CPU")
def _linear_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    smoothing: float,
    scale: Tensor,
    wanted: Sequence[bool],
    rows: int,
) -> list[Tensor]:
    hidden, weight = (one if readable(one) else one.contiguous() for one in (hidden, weight))
    losses, *found = _empty(hidden, weight.shape[1], rows, wanted)
    each = iter(found)
    made = [next(each) if one else None for one in wanted]
    for one in made[1:]:
        if one is not None:
            one[len(weight) :].zero_()
    numbers = None if bias is None else bias.detach().float().contiguous()
    places = targets.contiguous()
    job = _LossStruct(
        left_side(hidden),
        right_side(weight.t()),
        pointer(numbers),
        pointer(places),
        smoothing,
        scale.item(),
        pointer(losses),
        *map(pointer, made),
        torch.get_num_threads(),
    )
    if not library_or_error("linear_loss").flatout_linear_loss(ctypes.byref(job)):
        raise IndexError("a target is not a class")
    return [losses, *found]


def _empty(hidden: Tensor, width: int, rows: int, wanted: Sequence[bool]) -> list[Tensor]:
    """Tensors for the results."""
    shapes: tuple[Sequence[int], ...] = (hidden.shape, (rows, width), (rows,))
    sizes = [hidden.shape[:1], *(shape for shape, one in zip(shapes, wanted, strict=True) if one)]
    return [hidden.new_empty(size, dtype=torch.float32) for size in sizes]


torch.library.register_fake(
    "flatout::linear_loss",
    lambda hidden, weight, bias, targets, smoothing, scale, wanted, rows: _empty(hidden, weight.shape[1], rows, wanted),
    lib=_DEFINITIONS,
)


@register_flop_formula(torch.ops.flatout.linear_loss)
def _flops(hidden: Sequence[int], weight: Sequence[int], *others: Any, **_: object) -> int:  # as the operator has them
    """As torch's own operations would count; that the scores are computed twice is left out."""
    *_others, wanted, _rows = others
    return int(2 * hidden[0] * weight[0] * weight[1] * (1 + sum(wanted[:2])))
