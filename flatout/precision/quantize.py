"""Weights of linear layers in 8 and 4 bits: whole numbers and the scales that turn them back into weights.

A product that reads few weights per multiply-add is bound by memory, so fewer bits are faster in proportion; one that
reuses its weights gains only where the processor multiplies whole numbers faster.

    int8    one scale a row:            weight[o, i] ~ values[o, i] * scales[o],                  values -127 .. 127
    int4    one scale a group of a row: weight[o, i] ~ (values[o, i] - 8) * scales[o, i // group], values 0 .. 15

>>> import torch
>>> values, scales = quantize_rows_int8(torch.tensor([[1.0, -2.0]]))
>>> values.tolist(), [round(scale, 4) for scale in scales.tolist()]
([[64, -127]], [0.0157])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flatout.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

INT4_GROUP = 32
_ROWS_AT_ONCE = 1 << 22
"""Weights searched at a time in int4: the search holds some copies of them in fp32."""
_SHRINKS = tuple(1 - 0.04 * step for step in range(10))
"""Shares of the scale that just reaches a group's largest weight. A smaller one rounds the many more finely and
clips the few; which is better differs from group to group."""


def quantize_rows_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Floating point [out, in] -> int8 [out, in] and fp32 scales [out]; a row of zeros has scale 1.

    Each scale is the row's largest magnitude / 127. Raises UsageError for another shape or dtype, or inf and NaN.
    """
    import torch

    rows = _checked(weight)
    largest = rows.abs().amax(dim=1) if rows.shape[1] else rows.new_zeros(rows.shape[0])
    scales = _without_zeros(largest / 127)
    return (rows / scales[:, None]).round_().clamp_(-127, 127).to(torch.int8), scales


def quantize_groups_int4(weight: Tensor, group: int = INT4_GROUP) -> tuple[Tensor, Tensor]:
    """Floating point [out, in] -> uint8 [out, in], one value of 0 to 15 each, and fp32 scales [out, in / group].

    A scale may be negative: the range -8 .. 7 is then turned round, so that its longer side meets the group's larger
    extreme. Of several scales a group keeps the one of least squared error, refitted to its rounded values. Raises
    UsageError for another shape or dtype, inf and NaN, or a row that is no whole number of groups.
    """
    import torch

    rows = _checked(weight)
    if group < 1 or rows.shape[1] % group:
        what = f"the weight is {list(rows.shape)}, its groups {group}"
        remedy = "leave this layer in 8 bits, or choose a group that divides its inputs"
        raise UsageError(what, limit="the inputs must be a whole number of groups", remedy=remedy)
    values = torch.empty(rows.shape, dtype=torch.uint8, device=rows.device)
    scales = torch.empty(rows.shape[0], rows.shape[1] // group, dtype=torch.float32, device=rows.device)
    step = max(1, _ROWS_AT_ONCE // max(1, rows.shape[1]))
    for start in range(0, rows.shape[0], step):
        part = slice(start, start + step)
        found, found_scales = _best_int4(rows[part].reshape(-1, group))
        values[part] = found.view(-1, rows.shape[1])
        scales[part] = found_scales.view(-1, scales.shape[1])
    return values, scales


def _best_int4(groups: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 [groups, size] -> uint8 [groups, size] and fp32 [groups] of the least squared error found."""
    import torch

    low, high = groups.amin(dim=1), groups.amax(dim=1)
    extreme = torch.where(high >= -low, high, low)
    widest = _without_zeros(extreme / -8)  # puts the larger extreme exactly on -8
    best_error = torch.full_like(widest, torch.inf)
    best, best_scale = torch.full(groups.shape, 8, dtype=torch.uint8, device=groups.device), torch.ones_like(widest)
    for shrink in _SHRINKS:
        levels = (groups / (widest * shrink)[:, None]).round_().clamp_(-8, 7)
        products, squares = (groups * levels).sum(dim=1), levels.square().sum(dim=1)
        scale = torch.where(squares > 0, products / squares.clamp(min=1), torch.ones_like(squares))
        scale = _without_zeros(scale)
        error = (groups - levels * scale[:, None]).square_().sum(dim=1)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_scale = torch.where(better, scale, best_scale)
        best = torch.where(better[:, None], (levels + 8).to(torch.uint8), best)
    return best, best_scale


def _without_zeros(scales: Tensor) -> Tensor:
    """1 where a scale is 0, or so small that dividing by it overflows: whatever it scales is 0 then."""
    import torch

    return torch.where(scales.abs() >= torch.finfo(torch.float32).tiny, scales, torch.ones_like(scales))


def _checked(weight: Tensor) -> Tensor:
    if weight.dim() != 2 or not weight.is_floating_point():
        raise UsageError(
            f"the weight is {weight.dtype} {list(weight.shape)}", limit="it must be floating point [outputs, inputs]"
        )
    rows = weight.detach().float()
    if not rows.isfinite().all():
        raise not_finite([rows])
    return rows


def not_finite(weights: Sequence[Tensor]) -> UsageError:
    """For matrices with inf or NaN."""
    count = sum(int((~one.isfinite()).sum()) for one in weights)
    what = f"{count} of {sum(one.numel() for one in weights)} weights are inf or NaN"
    return UsageError(what, limit="whole numbers stand for neither", remedy="load the weights again, or use bf16")
