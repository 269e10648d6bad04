"""Batch normalisation in training, with the addition and the ReLU that follow it, as operators of torch for CPUs.

    torch.ops.flatout.batch_norm_statistics   mean and variance of each channel, and what follows from them
    torch.ops.flatout.batch_norm              ReLU((x - mean) / sqrt(variance + epsilon) weight + bias + addend)

Together they read and write memory less often than torch's operations, which follow one another (see
native_sources/batch_norm.cpp). Registered with shapes and gradients. They cannot be differentiated twice.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from flatout.kernels.bf16_products import ELEMENTS
from flatout.kernels.differentiated_once import differentiated_once
from flatout.kernels.native import library_or_error
from flatout.kernels.panels import pointer, pointers, whole_numbers

MEAN, VARIANCE = 0, 1
_STATISTICS = 5
"""Rows of what `statistics` returns: mean, variance (without Bessel's correction), and what the kernel derives."""

_DEFINITIONS = torch.library.Library("flatout", "FRAGMENT")
_DEFINITIONS.define("batch_norm_statistics(Tensor x, Tensor? weight, Tensor? bias, float epsilon) -> Tensor")
_DEFINITIONS.define(
    "batch_norm(Tensor x, Tensor statistics, Tensor? addend, Tensor? weight, Tensor? bias, bool relu) -> Tensor"
)
_DEFINITIONS.define(
    "batch_norm_gradients(Tensor gradient, Tensor x, Tensor statistics, Tensor? out, bool relu, bool of_x,"
    " bool of_addend) -> Tensor[]"
)


class _Context(Protocol):
    """torch's context of both passes."""

    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Tensor, Tensor, Tensor | None]
    relu: bool

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...


class _NormalisationStruct(ctypes.Structure):
    """`Normalisation` of native_sources/batch_norm.cpp."""

    _fields_ = (
        *pointers("x addend out gradient of_x of_addend weight bias statistics of_weight of_bias"),
        *whole_numbers("element rows channels plane rectified"),
        ("epsilon", ctypes.c_double),
        *whole_numbers("threads"),
    )


def readable(x: Tensor) -> bool:
    """Can the kernel read it where it lies, and would torch lay out its result alike? fp32 or bf16
    [batch, channels, ...] on the CPU, contiguous or, of images and volumes, channels_last."""
    if x.dtype not in ELEMENTS or x.device.type != "cpu" or x.ndim < 2:
        return False
    return x.is_contiguous() or (x.ndim in (4, 5) and _channels_last(x))


def statistics(x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float) -> Tensor:
    """What `batch_norm` needs of each channel of x: fp32 [5, channels], MEAN and VARIANCE among them; no gradient.

    x: fp32 or bf16 [batch, channels, ...]. weight and bias: fp32 [channels]. Sums are in fp32 within blocks of some
    hundred numbers and in fp64 beyond, and do not depend on the number of threads.
    """
    operator: Callable[..., Tensor] = torch.ops.flatout.batch_norm_statistics
    with torch.no_grad():
        return operator(x, weight, bias, epsilon)


batch_norm: Callable[..., Tensor] = torch.ops.flatout.batch_norm
"""batch_norm(x, statistics, addend, weight, bias, relu): like x. `statistics` are those of x, weight and bias, whose
gradients take them into account; addend: like x, or None."""
norm_gradients: Callable[..., Sequence[Tensor]] = torch.ops.flatout.batch_norm_gradients
"""norm_gradients(gradient, x, statistics, out, relu, of_x, of_addend): those of weight and bias, then those of x and of
the addend where they are wanted. out: the result, where something was added to it before ReLU."""


@torch.library.impl(_DEFINITIONS, "batch_norm_statistics", "CPU")
def _statistics(x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float) -> Tensor:
    x = _read(x)
    made = _fake_statistics(x)
    if x.numel():
        job = _job(x, made, relu=False)
        weight, bias = (None if one is None else one.contiguous() for one in (weight, bias))  # it may be expanded
        job.weight, job.bias, job.epsilon = pointer(weight), pointer(bias), epsilon
        library_or_error("batch_norm").flatout_measure_batch(ctypes.byref(job))
    return made


@torch.library.impl(_DEFINITIONS, "batch_norm", "CPU")
def _batch_norm(
    x: Tensor, statistics: Tensor, addend: Tensor | None, weight: Tensor | None, bias: Tensor | None, relu: bool
) -> Tensor:
    x = _read(x)
    addend = None if addend is None else _laid_out(addend, x)
    out = torch.empty_like(x)
    if x.numel():
        job = _job(x, statistics, relu)
        job.addend, job.out = pointer(addend), pointer(out)
        library_or_error("batch_norm").flatout_normalise_batch(ctypes.byref(job))
    return out


@torch.library.impl(_DEFINITIONS, "batch_norm_gradients", "CPU")
def _gradients(
    gradient: Tensor, x: Tensor, statistics: Tensor, out: Tensor | None, relu: bool, of_x: bool, of_addend: bool
) -> list[Tensor]:
    x = _read(x)
    gradient, out = _laid_out(gradient, x), None if out is None else _laid_out(out, x)
    made = _fake_gradients(gradient, x, statistics, out, relu, of_x, of_addend)
    if x.numel():
        job = _job(x, statistics, relu)
        job.gradient, job.out = pointer(gradient), pointer(out)
        job.of_weight, job.of_bias = pointer(made[0]), pointer(made[1])
        job.of_x, job.of_addend = pointer(made[2] if of_x else None), pointer(made[-1] if of_addend else None)
        library_or_error("batch_norm").flatout_normalise_batch_gradients(ctypes.byref(job))
    else:
        for one in made[:2]:
            one.zero_()
    return made


def _read(x: Tensor) -> Tensor:
    return x if readable(x) else x.contiguous()


def _job(x: Tensor, statistics: Tensor, relu: bool) -> _NormalisationStruct:
    channels = x.shape[1]
    job = _NormalisationStruct(x.data_ptr(), statistics=statistics.data_ptr(), channels=channels)
    job.element, job.rows, job.rectified = ELEMENTS[x.dtype], x.numel() // channels, relu
    job.plane = 0 if _channels_last(x) else x[0, 0].numel()
    job.threads = torch.get_num_threads()
    return job


def _channels_last(x: Tensor) -> bool:
    return x.movedim(1, -1).is_contiguous()


def _laid_out(other: Tensor, x: Tensor) -> Tensor:
    """In the layout of x, which has its shape."""
    if _channels_last(x):
        return other.movedim(1, -1).contiguous().movedim(-1, 1)
    return other.contiguous()


def _fake_statistics(x: Tensor, *_: object) -> Tensor:
    return x.new_empty((_STATISTICS, x.shape[1]), dtype=torch.float32)


def _fake_gradients(
    gradient: Tensor, x: Tensor, statistics: Tensor, out: Tensor | None, relu: bool, of_x: bool, of_addend: bool
) -> list[Tensor]:
    """[of weight, of bias], then those of x and of the addend where they are wanted."""
    weights = [statistics.new_empty(x.shape[1]) for _ in range(2)]
    return [*weights, *(torch.empty_like(_read(x)) for _ in range(of_x + of_addend))]


torch.library.register_fake("flatout::batch_norm_statistics", _fake_statistics, lib=_DEFINITIONS)
torch.library.register_fake("flatout::batch_norm", lambda x, *_: torch.empty_like(_read(x)), lib=_DEFINITIONS)
torch.library.register_fake("flatout::batch_norm_gradients", _fake_gradients, lib=_DEFINITIONS)


def _keep(
    ctx: _Context,
    inputs: tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, bool],
    output: Tensor,
) -> None:
    x, statistics, addend, _, _, ctx.relu = inputs
    # Without an addend the sign of the result follows from x.
    ctx.save_for_backward(x, statistics, output if ctx.relu and addend is not None else None)


def _backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
    of_x, _, of_addend, of_weight, of_bias, _ = ctx.needs_input_grad
    apart = of_addend and ctx.relu  # without ReLU the gradient of the addend is that of the result
    x, statistics, out = ctx.saved_tensors
    weights, biases, *others = norm_gradients(gradient, x, statistics, out, ctx.relu, of_x, apart)
    by_x = others[0] if of_x else None
    by_addend = None if not of_addend else others[-1] if apart else gradient
    return by_x, None, by_addend, weights if of_weight else None, biases if of_bias else None, None


torch.library.register_autograd("flatout::batch_norm", _backward, setup_context=_keep, lib=_DEFINITIONS)
differentiated_once("batch_norm_gradients", _DEFINITIONS)
