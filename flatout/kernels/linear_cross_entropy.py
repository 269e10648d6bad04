"""The loss of a classifier's last layer without its scores: cross_entropy(hidden @ weight^T + bias, targets) in chunks.

A language model's scores, [positions, vocabulary], are often the largest tensor of a step, and torch keeps three of
them: scores, their log-softmax and its gradient. Here a chunk of rows at a time is scored, turned into loss and into
gradients, and forgotten. The gradients are computed with the loss, so the backward pass only scales them. In half
precision on a GPU, class_chunks does it otherwise.

It saves memory. Time it saves where those large tensors would go through slow memory; on the CPUs that it was measured
on it costs about as much as torch's own way.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from flatout.arguments import wrong
from flatout.errors import UsageError
from flatout.kernels.class_chunks import CHUNK_BYTES_ON_GPU, LossByClasses, product
from flatout.kernels.differentiated_once import OnceContext, keep_origin, once_differentiated, origin_of
from flatout.torch_private.dispatch import keeps_graph

Reduction = Literal["mean", "sum"]
CHUNK_BYTES = 32 * 1024**2
"""Of scores on a CPU: small beside a step, large enough for products at full speed."""
TILE = 128
"""Rows that a GPU's products compute together; a chunk of so many, or a multiple, leaves none of them half empty."""
MOST_COUNTED = 0.9
"""Share of rows with a target: with more, copying these rows costs about what leaving out the others saves."""
ALIGNED = 64
"""Numbers: a GPU's products of rows that begin at multiples of this are several times faster than others."""


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    chunk_bytes: int | None = None,
    classes: int | None = None,
) -> Tensor:
    """cross_entropy(hidden @ weight^T + bias, targets) without holding the scores; a scalar in fp32 (fp64 for fp64).

    hidden: [..., features], what the last layer reads; weight: [classes, features] and bias: [classes], of that layer;
    targets: int64 [...], class indices. `ignore_index`, `label_smoothing` and `reduction` are those of
    `torch.nn.functional.cross_entropy`: ignored targets count neither in the sum nor in the mean, and a mean over none
    is NaN, with gradients of zero; on a CPU their scores are not computed. `classes`: only so many rows of the weight,
    the first, are classes; the others pad it to a convenient size and get gradients of zero.

    Scores are held for `chunk_bytes` at a time (at least one row; None: 32 MiB, on a GPU 100 MiB), and forgotten. For
    the backward pass only the gradients are kept, which are computed with the loss: as large as hidden, weight and
    bias. On an NVIDIA GPU, in half precision, a chunk has some classes of all rows instead, and the backward pass
    computes gradients, from scores computed again. Where a CPU with AVX-512 bf16 or AMX computes scores in bf16, none
    are held (without AMX up to 64 MiB of their exponentials, until the call ends); copies of hidden and sums of its
    gradient are, for each thread, and stay for the next call. The result is torch's but for the order of summation.
    Under autocast the products are in its dtype, the rest is in fp32; on a CPU gradients of fp16 are computed in fp32,
    with an fp32 copy of the weight, so that a loss scale comes in time for
    them. It cannot be differentiated twice (UsageError), nor be used in the transforms of torch.func.

        loss = flatout.linear_cross_entropy(hidden, model.head.weight, targets, model.head.bias)

    `Plan(loss="chunked")` has TrainStep and `flatout run` do the same to a model and a loss as they are written.

    Raises UsageError where shapes do not belong together and, on the CPU, for a target that is no class; on CUDA,
    where looking would wait for the device, that is torch's assertion.
    """
    _check(hidden, weight, targets, bias, reduction)
    _check_classes(classes, len(weight))
    _check_numbers(label_smoothing, chunk_bytes)
    rows = hidden.reshape(-1, hidden.shape[-1])
    flat = targets.reshape(-1)
    kind = hidden.device.type
    casts = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)  # on meta there is none
    dtype = torch.get_autocast_dtype(kind) if casts else hidden.dtype
    apply: Callable[..., Tensor] = _LinearCrossEntropy.apply
    if _by_classes(hidden, dtype):
        apply = LossByClasses.apply
    elif chunk_bytes is None:
        chunk_bytes = CHUNK_BYTES_ON_GPU if hidden.is_cuda else CHUNK_BYTES
    origin = origin_of(hidden, weight, bias)
    options = ignore_index, label_smoothing, reduction, chunk_bytes, classes, dtype
    return apply(rows, weight, bias, flat, *options, origin)


class _Context(OnceContext, Protocol):
    """torch's context of both passes."""

    saved_tensors: tuple[Tensor | None, ...]
    dtypes: tuple[torch.dtype | None, ...]
    rows: int
    """Of hidden, those that are ignored too."""

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        context: _Context,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        ignore_index: int,
        label_smoothing: float,
        reduction: Reduction,
        chunk_bytes: int,
        classes: int | None,
        dtype: torch.dtype,
        origin: Tensor | None,
    ) -> Tensor:
        kind = hidden.device.type
        if not torch.amp.is_autocast_available(kind):
            kind = "cpu"
        keep_origin(context, origin)
        context.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        context.rows = len(hidden)
        counted = _counted_rows(targets, ignore_index)
        if counted is not None:
            hidden, targets = hidden.index_select(0, counted), targets[counted]
        with torch.autocast(kind, enabled=False):
            terms = _Terms(hidden.to(dtype), weight, bias, targets, ignore_index, label_smoothing, classes)
            needs = context.needs_input_grad
            # As a number of that dtype: 1 / a whole number is in torch's default dtype, too coarse for fp64.
            count = terms.valid.sum(dtype=terms.exact) if reduction == "mean" else terms.losses.new_ones(())
            try:
                # Without any target the mean is 0 / 0, as torch has it; its gradient is zero, as torch has that.
                scale = 1 / count.clamp(min=1)
                gradients = terms.run(chunk_bytes, scale, hidden=needs[0], weight=needs[1], bias=needs[2])
            except (RuntimeError, IndexError) as error:
                _explain_targets(terms, error)
                raise
        context.save_for_backward(terms.valid, counted, *gradients)
        return terms.losses.sum() / count

    @staticmethod
    @once_differentiated
    def backward(context: _Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """What has no target gets a gradient of zero, whatever comes from above: a loss that the caller divides by its
        number of targets, none, sends infinity."""
        valid, counted, *saved = context.saved_tensors
        assert valid is not None
        scale = gradient.masked_fill(~valid.any(), 0)
        # They are as large as the weights: where this is the only backward pass, no copy of them is made.
        scaled = torch.mul if torch.compiler.is_compiling() or keeps_graph() else Tensor.mul_
        parts = [None if one is None else scaled(one, scale) for one in saved]
        if parts[0] is not None:
            parts[0].masked_fill_(~valid[:, None], 0)
            if counted is not None:
                parts[0] = parts[0].new_zeros(context.rows, parts[0].shape[1]).index_copy_(0, counted, parts[0])
        typed = [None if one is None else one.to(dtype) for one, dtype in zip(parts, context.dtypes, strict=True)]
        return (*typed, *[None] * 8)


def _counted_rows(targets: Tensor, ignored: int) -> Tensor | None:
    """The rows that have a target, where so few have one that the others are worth leaving out; None: all are computed.

    Of a masked language model one in seven has. Not on a GPU, where counting would wait for it, nor where a graph is
    traced or sizes alone are followed (by tensors of other types), as the number of rows would be data.
    """
    if targets.device.type != "cpu" or torch.compiler.is_compiling() or type(targets) is not Tensor:
        return None
    counted = (targets != ignored).nonzero()[:, 0]
    return counted if len(counted) <= MOST_COUNTED * len(targets) else None


class _Terms:
    """The terms' losses, and the gradients of their sum, row chunk by row chunk."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        ignored: int,
        smoothing: float,
        classes: int | None,
    ) -> None:
        self.rows = len(weight)
        """Of the weight, including those that are no classes."""
        weight, bias = weight[:classes], None if bias is None else bias[:classes]
        self.by_bf16_kernels = _by_bf16_kernels(hidden, weight)
        self.hidden, self.weight, self.bias = hidden, weight, bias
        if not self.by_bf16_kernels:
            self.weight = weight.to(hidden.dtype)
        self.smoothing = smoothing
        self.exact = torch.promote_types(hidden.dtype, torch.float32)
        self.fine = self.exact if hidden.dtype == torch.float16 else hidden.dtype
        """Of products for gradients: in fp16 those of a mean would vanish before a loss scale multiplies them."""
        self.valid = targets != ignored
        self.targets = torch.where(self.valid, targets, 0)
        self.losses = torch.zeros(len(hidden), dtype=self.exact, device=hidden.device)
        self.by_triton = _by_triton(hidden) and self.fine == hidden.dtype

    def run(
        self, chunk_bytes: int, scale: Tensor, *, hidden: bool, weight: bool, bias: bool
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        if self.by_bf16_kernels:
            return self._run_by_bf16_kernels(scale, [hidden, weight, bias])
        of_hidden = torch.empty_like(self.hidden, dtype=self.fine) if hidden else None
        classes, width = self.weight.shape
        weights = self.weight.to(self.fine) if hidden else self.weight
        of_weight = torch.empty(self.rows, width, dtype=self.exact, device=self.weight.device) if weight else None
        of_bias = torch.zeros(self.rows, dtype=self.exact, device=self.weight.device) if bias else None
        gradient = hidden or weight or bias
        chunks = self._chunks_by_triton if self.by_triton else self._chunks
        for number, (part, by_score) in enumerate(chunks(chunk_bytes, scale, gradient=gradient)):
            if not gradient:
                continue
            if of_bias is not None:
                of_bias[:classes] += by_score.sum(0, dtype=self.exact)
            by_score = by_score.to(self.fine)
            if of_hidden is not None:
                torch.mm(by_score, weights, out=of_hidden[part])
            if of_weight is not None:
                product(of_weight[:classes], by_score.T, self.hidden[part].to(self.fine), add=number > 0)
        if of_weight is not None:
            of_weight[classes if len(self.hidden) else 0 :] = 0  # what pads the classes
        return of_hidden, of_weight, of_bias

    def _run_by_bf16_kernels(
        self, scale: Tensor, wanted: list[bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The same without chunks: scores are never in memory."""
        from flatout.kernels.linear_loss import IGNORED, linear_loss  # whose operator is registered when it is needed

        targets = torch.where(self.valid, self.targets, IGNORED)
        self.losses, *found = linear_loss(
            self.hidden, self.weight, self.bias, targets, self.smoothing, scale, wanted, self.rows
        )
        made = iter(found)
        of_hidden, of_weight, of_bias = (next(made) if one else None for one in wanted)
        return of_hidden, of_weight, of_bias

    def _parts(self, chunk_bytes: int, row_bytes: int, tile: int = 1) -> list[slice]:
        most = max(1, chunk_bytes // row_bytes)
        most -= most % tile if most > tile else 0
        count = -(-len(self.hidden) // most)
        rows = -(-len(self.hidden) // max(1, count))  # equally many, in whole tiles
        rows = max(1, min(most, -(-rows // tile) * tile))
        return [slice(start, start + rows) for start in range(0, len(self.hidden), rows)]

    def _chunks(self, chunk_bytes: int, scale: Tensor, *, gradient: bool) -> Iterator[tuple[slice, Tensor]]:
        """Note rows' losses; yields the gradient by their scores, [rows, classes], made in the scores' place."""
        for part in self._parts(chunk_bytes, self.weight.shape[0] * self.exact.itemsize):
            valid, targets = self.valid[part], self.targets[part][:, None]
            scores = functional.linear(self.hidden[part], self.weight).to(self.exact)
            if self.bias is not None:
                scores += self.bias.to(self.exact)
            scores = scores.log_softmax(-1)  # one pass, where logsumexp takes four
            losses = (self.smoothing - 1) * scores.gather(1, targets)
            if self.smoothing:
                losses -= self.smoothing * scores.mean(-1, keepdim=True)
            self.losses[part] = torch.where(valid, losses[:, 0], 0)
            if gradient:
                scores.exp_()
                if self.smoothing:
                    scores -= self.smoothing / scores.shape[1]
                scores.scatter_add_(1, targets, torch.full_like(losses, self.smoothing - 1))
                scores.mul_(valid[:, None] * scale)
            yield part, scores

    def _chunks_by_triton(self, chunk_bytes: int, scale: Tensor, *, gradient: bool) -> Iterator[tuple[slice, Tensor]]:
        """The same by Triton kernels. All chunks use one buffer, whose rows begin where products are fast."""
        from flatout.kernels.score_gradients import add_log_sums_, gradients_of_chunk_  # which imports Triton

        classes, scale = self.weight.shape[0], scale.to(torch.float32)
        # The kernels read at the targets: torch's assertion comes before them where one of them is no class.
        self.weight[:, 0].gather(0, self.targets)
        stride = -(-classes // ALIGNED) * ALIGNED
        parts = self._parts(chunk_bytes, stride * self.hidden.dtype.itemsize, tile=TILE)
        rows = min(len(self.hidden), parts[0].stop) if parts else 0
        buffer = self.hidden.new_empty(rows, stride)[:, :classes]
        log_sums = torch.empty_like(self.losses)
        for part in parts:
            hidden = self.hidden[part]
            scores = torch.mm(hidden, self.weight.T, out=buffer[: len(hidden)])
            chunk = scores, self.bias, self.targets[part], self.valid[part]
            add_log_sums_(*chunk, None, log_sums[part], self.losses[part], classes=classes, smoothing=self.smoothing)
            if gradient:
                gradients_of_chunk_(*chunk, log_sums[part], scale, classes=classes, smoothing=self.smoothing)
            yield part, scores


def _by_triton(hidden: Tensor) -> bool:
    """Whether these scores go through the Triton kernels: on CUDA, where Triton is, in the dtypes that they have.
    Compiled code fuses the operations by itself."""
    known = hidden.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return hidden.is_cuda and known and not torch.compiler.is_compiling() and _has_triton()


def _by_classes(hidden: Tensor, dtype: torch.dtype) -> bool:
    """Whether a chunk has some classes of all rows: in half precision on an NVIDIA GPU."""
    half = dtype in (torch.bfloat16, torch.float16)
    return half and torch.version.hip is None and _by_triton(hidden)


def _by_bf16_kernels(hidden: Tensor, weight: Tensor) -> bool:
    """Whether one kernel makes this loss: on a CPU, in bf16, where that has instructions for it."""
    if hidden.device.type != "cpu" or hidden.dtype != torch.bfloat16 or torch.compiler.is_compiling():
        return False
    from flatout.kernels.bf16_products import obstacle, readable

    return readable(weight) and hidden.numel() > 0 and obstacle() is None


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _explain_targets(terms: _Terms, error: Exception) -> None:
    """Raise a UsageError if a target that is no class was the reason. Only after an error: looking costs a pass."""
    classes = terms.weight.shape[0]
    if terms.targets.device.type != "cpu":
        return
    wrong = terms.targets[terms.valid & ((terms.targets < 0) | (terms.targets >= classes))]
    if len(wrong):
        raise UsageError(
            f"a target is class {int(wrong[0])}",
            limit=f"weight has {classes} rows, one a class, 0 to {classes - 1}",
            remedy="give the last layer more rows, or mark such targets with ignore_index",
        ) from error


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, reduction: str) -> None:
    for name, value in {"hidden": hidden, "weight": weight, "targets": targets, "bias": bias}.items():
        if not isinstance(value, Tensor) and not (name == "bias" and value is None):
            raise wrong(name, value, "it is a torch.Tensor")
    if weight.dim() != 2 or not len(weight) or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise UsageError(
            f"hidden is {list(hidden.shape)} and weight {list(weight.shape)}",
            limit="they are [..., features] and [classes, features]",
        )
    if not hidden.is_floating_point() or not weight.is_floating_point():
        limit = "scores are computed in floating-point numbers"
        raise UsageError(f"hidden is {hidden.dtype} and weight {weight.dtype}", limit=limit)
    if targets.shape != hidden.shape[:-1] or targets.dtype != torch.int64:
        raise UsageError(
            f"targets are {list(targets.shape)} of {targets.dtype}",
            limit=f"they are class indices, int64 {list(hidden.shape[:-1])}, one for each row of hidden",
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise UsageError(f"bias is {list(bias.shape)}", limit=f"it is [classes], here [{weight.shape[0]}]")
    for name, value in {"weight": weight, "targets": targets, "bias": bias}.items():
        if value is not None and value.device != hidden.device:
            verb = "are" if name == "targets" else "is"
            what = f"{name} {verb} on {value.device} and hidden on {hidden.device}"
            raise UsageError(what, limit="they are on one device", remedy=f"move it: {name}.to(hidden.device)")
    if reduction not in ("mean", "sum"):
        raise UsageError(f"reduction is {reduction!r}", limit="it is 'mean' or 'sum'")


def _check_classes(classes: int | None, rows: int) -> None:
    if classes is None:
        return
    if isinstance(classes, bool) or not isinstance(classes, int) or not 1 <= classes <= rows:
        raise UsageError(f"classes is {classes!r}", limit=f"it is a whole number from 1 to the {rows} rows of weight")


def _check_numbers(label_smoothing: float, chunk_bytes: int | None) -> None:
    number = isinstance(label_smoothing, int | float)
    if not number or not 0 <= label_smoothing <= 1:
        raise UsageError(f"label_smoothing is {label_smoothing!r}", limit="it is a number from 0 to 1")
    if chunk_bytes is None:
        return
    if isinstance(chunk_bytes, bool) or not isinstance(chunk_bytes, int) or chunk_bytes < 1:
        raise UsageError(f"chunk_bytes is {chunk_bytes!r}", limit="it must be a whole number of at least 1")
