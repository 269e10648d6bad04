"""A chunk of scores turned into losses and gradients on a GPU (Triton), for `linear_cross_entropy`.

torch takes some eight passes over the chunk for it, each through the GPU's memory: conversion, bias, log-sum, shift,
exponential, one-hot, mask, scale, conversion back. Here a chunk is read once for the loss, and read and written
once for the gradients.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
WARPS = 16
COLUMNS = 2048
"""Of a block of gradients."""


def add_log_sums_(
    scores: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    valid: Tensor,
    state: Tensor | None,
    log_sums: Tensor,
    losses: Tensor,
    *,
    first_class: int = 0,
    classes: int,
    smoothing: float,
    last: bool = True,
) -> None:
    """Take one more chunk of classes into each row's log-sum; after the last, write log-sums and losses.

    scores: [rows, classes of the chunk], each row contiguous; bias: of the chunk's classes, or None; targets: int64
    [rows], each a class; valid: bool [rows], False gives a loss of zero; state: fp32 [4, rows], kept from chunk to
    chunk, whatever is in it before the first, whose first class is 0 (None: there is one chunk); log_sums and losses:
    fp32 [rows]; classes: of all chunks.
    """
    rows, width = scores.shape
    if type(scores) is not Tensor or not rows:  # sizes alone are followed
        return
    block = min(BLOCK, triton.next_power_of_2(width))
    with torch.cuda.device_of(scores):
        _log_sums[(rows,)](
            scores,
            scores if bias is None else bias,
            targets,
            valid,
            log_sums if state is None else state,
            log_sums,
            losses,
            scores.stride(0),
            first_class,
            rows,
            width,
            classes,
            smoothing,
            HAS_BIAS=bias is not None,
            SMOOTHED=smoothing > 0,
            FIRST=first_class == 0,
            LAST=last,
            BLOCKS=triton.cdiv(width, block),
            BLOCK=block,
            num_warps=WARPS if width > BLOCK // 4 else 4,
        )


def gradients_of_chunk_(
    scores: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    valid: Tensor,
    log_sums: Tensor,
    factor: Tensor,
    *,
    first_class: int = 0,
    classes: int,
    smoothing: float,
) -> None:
    """Write over a chunk's scores the gradient of the rows' losses times `factor`, a scalar in fp32; the other
    arguments are those of `add_log_sums_`."""
    rows, width = scores.shape
    if type(scores) is not Tensor or not rows:
        return
    block = min(COLUMNS, triton.next_power_of_2(width))
    with torch.cuda.device_of(scores):
        _gradients[(rows, triton.cdiv(width, block))](
            scores,
            scores if bias is None else bias,
            targets,
            valid,
            log_sums,
            factor,
            scores.stride(0),
            first_class,
            width,
            classes,
            smoothing,
            HAS_BIAS=bias is not None,
            BLOCK=block,
            num_warps=8 if block == COLUMNS else 4,
        )


@triton.jit  # type: ignore[untyped-decorator]
def _log_sums(  # type: ignore[no-untyped-def]
    scores,
    bias,
    targets,
    valid,
    state,
    log_sums,
    losses,
    row_stride,
    first_class,
    rows,
    width,
    classes,
    smoothing,
    HAS_BIAS: tl.constexpr,
    SMOOTHED: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    scores += row * row_stride
    columns = tl.arange(0, BLOCK)
    largest = -float("inf")
    total = 0.0
    at_target = 0.0
    summed = 0.0
    if not FIRST:
        largest = tl.load(state + row)
        total = tl.load(state + rows + row)
        at_target = tl.load(state + 2 * rows + row)
        if SMOOTHED:
            summed = tl.load(state + 3 * rows + row)
    for block in range(BLOCKS):
        start = block * BLOCK
        inside = start + columns < width
        part = tl.load(scores + start + columns, mask=inside, other=-float("inf")).to(tl.float32)
        if HAS_BIAS:
            part += tl.load(bias + start + columns, mask=inside, other=0.0).to(tl.float32)
        higher = tl.maximum(largest, tl.max(part))
        shift = tl.where(higher == -float("inf"), 0.0, higher)  # -inf less -inf is no number
        total = total * tl.exp(largest - shift) + tl.sum(tl.exp(part - shift))
        largest = higher
        if SMOOTHED:
            summed += tl.sum(tl.where(inside, part, 0.0))
    target = tl.load(targets + row) - first_class
    here = (target >= 0) & (target < width)
    found = tl.load(scores + target, mask=here, other=0.0).to(tl.float32)
    if HAS_BIAS:
        found += tl.load(bias + target, mask=here, other=0.0).to(tl.float32)
    at_target = tl.where(here, found, at_target)
    if LAST:
        log_sum = largest + tl.log(total)
        loss = log_sum - (1.0 - smoothing) * at_target
        if SMOOTHED:
            loss -= smoothing * summed / classes
        tl.store(log_sums + row, log_sum)
        tl.store(losses + row, tl.where(tl.load(valid + row), loss, 0.0))
    else:
        tl.store(state + row, largest)
        tl.store(state + rows + row, total)
        tl.store(state + 2 * rows + row, at_target)
        if SMOOTHED:
            tl.store(state + 3 * rows + row, summed)


@triton.jit  # type: ignore[untyped-decorator]
def _gradients(  # type: ignore[no-untyped-def]
    scores,
    bias,
    targets,
    valid,
    log_sums,
    factor,
    row_stride,
    first_class,
    width,
    classes,
    smoothing,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    scores += row * row_stride
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    part = tl.load(scores + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        part += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    target = tl.load(targets + row) - first_class
    part = tl.exp(part - tl.load(log_sums + row)) - smoothing / classes
    part -= tl.where(columns == target, 1.0 - smoothing, 0.0)
    part = tl.where(tl.load(valid + row), part * tl.load(factor), 0.0)
    tl.store(scores + columns, part.to(scores.dtype.element_ty), mask=inside)
