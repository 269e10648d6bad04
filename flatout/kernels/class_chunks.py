"""`linear_cross_entropy` in half precision on a GPU: scores by chunks of classes, for the loss and for the gradients.

Chunks of rows need a sum of the weight's gradients in fp32, as large as the weight, and read and write it once for each
chunk. Here a chunk has all rows and some classes: each row of the weight's gradient is computed once, in its own dtype,
and what is summed up, hidden's gradient, is small. The price is that scores are computed twice, but for the last
chunk's, which are still there when the backward pass begins.

Measured on an H100 against chunks of rows in bf16: 2,048 x 512 x 50,000 takes 0.8 of the time, 8,192 x 768 x 50,257
0.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from flatout.kernels.differentiated_once import OnceContext, keep_origin, once_differentiated

CHUNK_BYTES_ON_GPU = 100 * 1024**2
"""Of scores: small beside a step, large enough for products at full speed. Each chunk costs launches, and scores that
are computed again or a pass over gradients, so there are fewer than on a CPU."""
LEAST_CLASSES = 1024
"""Of a chunk, unless the caller asks for less memory: products of fewer columns are slow."""
TILE = 128
"""Columns that products compute together."""
ALIGNED = 8
"""Numbers of 16 bits: products of sizes that are not multiples of this are several times slower."""


class ClassChunk(NamedTuple):
    start: int
    end: int

    @property
    def classes(self) -> int:
        return self.end - self.start


def class_chunks(classes: int, rows: int, chunk_bytes: int, item_bytes: int) -> list[ClassChunk]:
    """All classes in order; each chunk's scores take at most `chunk_bytes` where one class of all rows does.

    What makes the number of classes no multiple of eight is a chunk by itself, the first, so that all others are fast.

    >>> class_chunks(50_257, 8192, 100 << 20, 2)[:2]
    [ClassChunk(start=0, end=1), ClassChunk(start=1, end=6401)]
    >>> class_chunks(10, 4, 24, 2)
    [ClassChunk(start=0, end=2), ClassChunk(start=2, end=5), ClassChunk(start=5, end=8), ClassChunk(start=8, end=10)]
    """
    most = max(1, chunk_bytes // max(1, rows * item_bytes))
    most -= most % TILE if most > TILE else 0
    rest = classes % ALIGNED if classes > ALIGNED else 0
    chunks = [ClassChunk(start, min(start + most, rest)) for start in range(0, rest, most)]
    count = -(-(classes - rest) // most)
    each = -(-(classes - rest) // count)
    if most >= TILE:
        each = -(-each // TILE) * TILE
    return chunks + [ClassChunk(start, min(start + each, classes)) for start in range(rest, classes, each)]


class _Context(OnceContext, Protocol):
    """torch's context of both passes."""

    saved_tensors: tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor | None]
    buffer: Tensor | None
    chunks: list[ClassChunk]
    smoothing: float
    dtype: torch.dtype

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...


class LossByClasses(torch.autograd.Function):
    """hidden: [rows, features]; the result is a scalar in fp32. Products are in `dtype`, 16 bits wide."""

    @staticmethod
    def forward(
        context: _Context,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        ignore_index: int,
        label_smoothing: float,
        reduction: Literal["mean", "sum"],
        chunk_bytes: int | None,
        classes: int | None,
        dtype: torch.dtype,
        origin: Tensor | None,
    ) -> Tensor:
        from flatout.kernels.score_gradients import add_log_sums_  # which imports Triton

        read = hidden.to(dtype)
        valid = targets != ignore_index
        targets = torch.where(valid, targets, 0)
        count = classes or len(weight)
        # The kernels look for the target's class: torch's assertion comes before them where it is none.
        weight[:count, 0].gather(0, targets)
        if chunk_bytes is None:
            chunk_bytes = max(CHUNK_BYTES_ON_GPU, LEAST_CLASSES * len(read) * dtype.itemsize)
        chunks = class_chunks(count, len(read), chunk_bytes, dtype.itemsize)
        scores = _Scores(read, weight, chunks)
        state = read.new_empty(4, len(read), dtype=torch.float32)
        log_sums, losses = read.new_empty(2, len(read), dtype=torch.float32)
        for chunk in chunks:
            add_log_sums_(
                scores.computed(chunk),
                None if bias is None else bias[chunk.start : chunk.end],
                targets,
                valid,
                state,
                log_sums,
                losses,
                first_class=chunk.start,
                classes=count,
                smoothing=label_smoothing,
                last=chunk is chunks[-1],
            )
        terms = valid.sum() if reduction == "mean" else None
        context.save_for_backward(read, weight, bias, targets, valid, log_sums, terms)
        context.buffer = scores.buffer if any(context.needs_input_grad) else None
        context.chunks, context.smoothing, context.dtype = chunks, label_smoothing, hidden.dtype
        keep_origin(context, origin)
        total: Tensor = losses.sum()
        return total if terms is None else total / terms  # without any target 0 / 0, as torch has it

    @staticmethod
    @once_differentiated
    def backward(context: _Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Rows without a target get a gradient of zero, whatever comes from above: a loss that the caller divides by
        its number of targets, none, sends infinity."""
        from flatout.kernels.score_gradients import gradients_of_chunk_

        read, weight, bias, targets, valid, log_sums, terms = context.saved_tensors
        for_hidden, for_weight, for_bias = context.needs_input_grad[:3]
        # What the forward pass computed last is still there, unless this is not the first backward pass.
        chunks = context.chunks
        scores = _Scores(read, weight, chunks, context.buffer)
        context.buffer = None
        factor = gradient if terms is None else gradient / terms.clamp(min=1)
        of_hidden = read.new_empty(read.shape, dtype=torch.float32) if for_hidden else None
        of_weight, of_bias = (
            torch.empty_like(one) if wanted and one is not None else None
            for one, wanted in ((weight, for_weight), (bias, for_bias))
        )
        for chunk in reversed(chunks):
            part = slice(chunk.start, chunk.end)
            by_score = scores.computed(chunk)
            gradients_of_chunk_(
                by_score,
                None if bias is None else bias[part],
                targets,
                valid,
                log_sums,
                factor,
                first_class=chunk.start,
                classes=chunks[-1].end,
                smoothing=context.smoothing,
            )
            if of_bias is not None:
                of_bias[part] = by_score.sum(0, dtype=torch.float32)
            if of_weight is not None:
                product(of_weight[part], by_score.T, read, add=False)
            if of_hidden is not None:
                product(of_hidden, by_score, scores.weight_of(chunk), add=chunk is not chunks[-1])
        for one in (of_weight, of_bias):
            if one is not None:
                one[chunks[-1].end :] = 0  # what pads the classes
        typed = None if of_hidden is None else of_hidden.to(context.dtype)
        return (typed, of_weight, of_bias, *[None] * 8)


class _Scores:
    """The scores of one chunk at a time, in one buffer: a new one, or one that holds the scores of the last chunk."""

    def __init__(
        self, read: Tensor, weight: Tensor, chunks: Sequence[ClassChunk], buffer: Tensor | None = None
    ) -> None:
        self._read, self._weight = read, weight
        self._held = None if buffer is None else chunks[-1]
        self.buffer = read.new_empty(len(read) * max(map(_stride, chunks))) if buffer is None else buffer

    def computed(self, chunk: ClassChunk) -> Tensor:
        """[rows, classes of the chunk]. Whatever is done to them holds for this call alone."""
        rows, stride = len(self._read), _stride(chunk)
        scores = self.buffer[: rows * stride].view(rows, stride)[:, : chunk.classes]
        if self._held != chunk:
            torch.mm(self._read, self.weight_of(chunk).T, out=scores)
        self._held = None
        return scores

    def weight_of(self, chunk: ClassChunk) -> Tensor:
        return self._weight[chunk.start : chunk.end].to(self._read.dtype)


def _stride(chunk: ClassChunk) -> int:
    """Rows of scores begin where products are fast."""
    return -(-chunk.classes // ALIGNED) * ALIGNED


def product(out: Tensor, left: Tensor, right: Tensor, *, add: bool) -> None:
    """out = left @ right, or out += left @ right, summed up in out's dtype."""
    wider = out.is_cuda and torch.version.hip is None and out.dtype == torch.float32
    if out.dtype == left.dtype and add:
        out.addmm_(left, right)
    elif out.dtype == left.dtype:
        torch.mm(left, right, out=out)
    elif wider and add:  # no product in the narrower dtype is written and read again
        torch.addmm(out, left, right, out_dtype=out.dtype, out=out)
    elif wider:
        torch.mm(left, right, out_dtype=out.dtype, out=out)
    elif add:
        out += left @ right
    else:
        out.copy_(left @ right)
