"""A chunk of scores turned into losses and gradients in one launch on a GPU (Triton), for `linear_cross_entropy`.

torch takes some eight passes over the chunk for it, each through the GPU's memory: conversion, bias, log-sum, shift,
exponential, one-hot, mask, scale, conversion back. Here a row is read twice and written once, in its own dtype.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
WARPS = 16


def score_gradients_(
    scores: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    valid: Tensor,
    scale: Tensor,
    losses: Tensor,
    *,
    smoothing: float,
    gradient: bool,
) -> None:
    """Write each row's cross-entropy to `losses`, and with `gradient` its gradient times `scale` over the scores.

    scores: [rows, classes] in fp32, bf16 or fp16, each row contiguous; bias: [classes] or None, added to the scores;
    targets: int64 [rows], each a class; valid: bool [rows], False gives a loss and a gradient of zero; scale: fp32, a
    scalar; losses: fp32 [rows].
    """
    rows, classes = scores.shape
    with torch.cuda.device_of(scores):  # Triton launches on the current GPU
        _kernel[(rows,)](
            scores,
            scores if bias is None else bias,
            targets,
            valid,
            scale,
            losses,
            scores.stride(0),
            smoothing,
            CLASSES=classes,
            HAS_BIAS=bias is not None,
            GRADIENT=gradient,
            BLOCK=min(BLOCK, triton.next_power_of_2(classes)),
            num_warps=WARPS if classes > BLOCK // 4 else 4,
        )


@triton.jit  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]
    scores,
    bias,
    targets,
    valid,
    scale,
    losses,
    row_stride,
    smoothing,
    CLASSES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)  # rows x classes may exceed 32 bits
    scores += row * row_stride
    columns = tl.arange(0, BLOCK)
    counts = tl.load(valid + row)
    target = tl.load(targets + row)
    at_target = tl.load(scores + target).to(tl.float32)
    if HAS_BIAS:
        at_target += tl.load(bias + target).to(tl.float32)

    largest = -float("inf")
    total = 0.0
    summed = 0.0
    for start in range(0, CLASSES, BLOCK):
        inside = start + columns < CLASSES
        part = tl.load(scores + start + columns, mask=inside, other=-float("inf")).to(tl.float32)
        if HAS_BIAS:
            part += tl.load(bias + start + columns, mask=inside, other=0.0).to(tl.float32)
        higher = tl.maximum(largest, tl.max(part))
        total = total * tl.exp(largest - higher) + tl.sum(tl.exp(part - higher))
        largest = higher
        summed += tl.sum(tl.where(inside, part, 0.0))
    log_sum = largest + tl.log(total)
    loss = log_sum - (1.0 - smoothing) * at_target - smoothing * summed / CLASSES
    tl.store(losses + row, tl.where(counts, loss, 0.0))

    if GRADIENT:
        factor = tl.load(scale)
        for start in range(0, CLASSES, BLOCK):
            inside = start + columns < CLASSES
            part = tl.load(scores + start + columns, mask=inside, other=0.0).to(tl.float32)
            if HAS_BIAS:
                part += tl.load(bias + start + columns, mask=inside, other=0.0).to(tl.float32)
            part = tl.exp(part - log_sum) - smoothing / CLASSES
            part -= tl.where(start + columns == target, 1.0 - smoothing, 0.0)
            part = tl.where(counts, part * factor, 0.0)
            tl.store(scores + start + columns, part.to(scores.dtype.element_ty), mask=inside)
