"""Operators with products in bf16 on the CPU: linear layers, attention and GELU, as operators of torch.

    torch.ops.flatout.linear              x weight^T + bias
    torch.ops.flatout.attention           softmax(q k^T scale + mask) v
    torch.ops.flatout.packed_attention    the same within each of many sequences that lie in one row; no gradients
    torch.ops.flatout.gelu_tanh           x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2

Registered with their shapes, gradients and numbers of operations, so torch.compile, autograd, forecasts and FLOP
counters see them like torch's own. None can be differentiated twice.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from flatout.errors import UsageError
from flatout.kernels.bf16_products import ELEMENTS, product, sums_of_columns
from flatout.kernels.differentiated_once import differentiated_once
from flatout.kernels.native import library_or_error
from flatout.kernels.panels import pointer, pointers, whole_numbers

_DEFINITIONS = torch.library.Library("flatout", "FRAGMENT")
_DEFINITIONS.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_DEFINITIONS.define("linear_gradients(Tensor gradient, Tensor x, Tensor weight, bool[3] wanted) -> Tensor[]")
_ATTENTION = "Tensor queries, Tensor keys, Tensor values, Tensor? mask, bool causal, float scale"
_DEFINITIONS.define(f"attention({_ATTENTION}) -> (Tensor, Tensor)")
_DEFINITIONS.define(f"attention_gradients(Tensor gradient, Tensor out, Tensor log_sums, {_ATTENTION}) -> Tensor[]")
_PACKED = "Tensor queries, Tensor keys, Tensor values, int[] lengths, bool causal, float scale"
_DEFINITIONS.define(f"packed_attention({_PACKED}) -> Tensor")
_DEFINITIONS.define("gelu_tanh(Tensor x) -> Tensor")
_DEFINITIONS.define("gelu_tanh_gradient(Tensor gradient, Tensor x) -> Tensor")


class _Context(Protocol):
    """torch's context of both passes."""

    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Tensor, ...]
    bias_dtype: torch.dtype | None
    causal: bool
    scale: float

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...

    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...


# linear layers


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight^T + bias: [..., inputs] -> [..., outputs] in x's dtype, fp32 or bf16.

    weight: [outputs, inputs] and bias: [outputs], in fp32 or bf16. Products are of numbers rounded to bf16 and summed
    up in fp32; gradients come in the dtypes of x, weight and bias.
    """
    operator: Callable[..., Tensor] = torch.ops.flatout.linear
    rows = operator(x.reshape(-1, x.shape[-1]), weight, bias)
    return rows if x.ndim == 2 else rows.view(*x.shape[:-1], weight.shape[0])


@torch.library.impl(_DEFINITIONS, "linear", "CPU")
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return product(x, weight.t(), x.dtype, bias)


@torch.library.impl(_DEFINITIONS, "linear_gradients", "CPU")
def _linear_gradients(gradient: Tensor, x: Tensor, weight: Tensor, wanted: Sequence[bool]) -> list[Tensor]:
    of_x, of_weight, of_bias = wanted
    found = []
    if of_x:
        found.append(product(gradient, weight, x.dtype))
    if of_weight and weight.stride(0) == 1 and weight.shape[1] > 1:  # laid out as the weight is
        found.append(product(x.t(), gradient, weight.dtype).t())
    elif of_weight:
        found.append(product(gradient.t(), x, weight.dtype))
    if of_bias:
        found.append(sums_of_columns(gradient))
    return found


torch.library.register_fake(
    "flatout::linear", lambda x, weight, bias: x.new_empty(x.shape[0], weight.shape[0]), lib=_DEFINITIONS
)


def _fake_linear_gradients(gradient: Tensor, x: Tensor, weight: Tensor, wanted: Sequence[bool]) -> list[Tensor]:
    columns = weight.stride(0) == 1 and weight.shape[1] > 1
    of_weight = weight.new_empty(weight.shape[::-1]).t() if columns else weight.new_empty(weight.shape)
    made = (
        x.new_empty(gradient.shape[0], x.shape[1]),
        of_weight,
        gradient.new_empty(gradient.shape[1], dtype=torch.float32),
    )
    return [one for one, is_wanted in zip(made, wanted, strict=True) if is_wanted]


torch.library.register_fake("flatout::linear_gradients", _fake_linear_gradients, lib=_DEFINITIONS)


def _keep_for_linear(ctx: _Context, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    x, weight, bias = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    of_x, of_weight, *_ = ctx.needs_input_grad  # one longer here than in the backward pass
    # As torch's layer: what no gradient needs may be changed, or freed, before the backward pass.
    ctx.save_for_backward(x if of_weight else x.new_empty(0, x.shape[1]), weight if of_x else weight.data)


def _linear_backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad)
    operator: Callable[..., list[Tensor]] = torch.ops.flatout.linear_gradients
    found = iter(operator(gradient, x, weight, wanted))
    of_x, of_weight, of_bias = (next(found) if one else None for one in wanted)
    if of_bias is not None and ctx.bias_dtype is not None:
        of_bias = of_bias.to(ctx.bias_dtype)
    return of_x, of_weight, of_bias


torch.library.register_autograd("flatout::linear", _linear_backward, setup_context=_keep_for_linear, lib=_DEFINITIONS)
differentiated_once("linear_gradients", _DEFINITIONS)


@register_flop_formula(torch.ops.flatout.linear)
def _linear_flops(x: Sequence[int], weight: Sequence[int], *_: object, **__: object) -> int:
    return 2 * x[0] * weight[0] * weight[1]


@register_flop_formula(torch.ops.flatout.linear_gradients)
def _linear_gradients_flops(
    gradient: Sequence[int], x: Sequence[int], weight: Sequence[int], wanted: Sequence[bool], **_: object
) -> int:
    return 2 * gradient[0] * weight[0] * weight[1] * sum(wanted[:2])


# attention


class _HeadsStruct(ctypes.Structure):
    """`Heads` of native_sources/matrix_attention.cpp."""

    _fields_ = (*pointers("data"), *whole_numbers("sample head token"))


class _MaskStruct(ctypes.Structure):
    """`Mask` there."""

    _fields_ = (*pointers("data"), *whole_numbers("kind sample head query key"))


class _AttentionStruct(ctypes.Structure):
    """`Attention` there."""

    _fields_ = (
        *((name, _HeadsStruct) for name in ("queries", "keys", "values", "out")),
        *((name, _HeadsStruct) for name in ("of_out", "of_queries", "of_keys", "of_values")),
        ("mask", _MaskStruct),
        *pointers("log_sums"),
        *whole_numbers("samples heads query_count key_count features value_features"),
        ("scale", ctypes.c_float),
        *whole_numbers("causal threads"),
    )


MASK_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.bool: 2}
"""Masks that are added to the scores, or say which keys may be attended to; as the kernel numbers them."""


def attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """softmax(queries keys^T scale + mask) values: bf16 [batch, heads, tokens, features], like torch's
    scaled_dot_product_attention without dropout.

    keys and values: bf16 [batch, heads, keys, features]. mask: bool (True: may attend), fp32 or bf16 (added),
    broadcast to [batch, heads, tokens, keys]; it gets no gradient. A query that may attend to nothing gets zeros.
    """
    operator: Callable[..., tuple[Tensor, Tensor]] = torch.ops.flatout.attention
    factor = 1 / math.sqrt(queries.shape[-1]) if scale is None else scale
    return operator(queries, keys, values, mask, causal, factor)[0]


@torch.library.impl(_DEFINITIONS, "attention", "CPU")
def _attention(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    queries, keys, values = (_with_rows(one) for one in (queries, keys, values))
    out, log_sums = _fake_attention(queries, keys, values, mask, causal, scale)
    if out.numel():
        job = _attention_job(queries, keys, values, out, log_sums, mask, causal, scale)
        library_or_error("matrix_attention").flatout_attention(ctypes.byref(job))
    return out, log_sums


@torch.library.impl(_DEFINITIONS, "attention_gradients", "CPU")
def _attention_gradients(
    gradient: Tensor,
    out: Tensor,
    log_sums: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
) -> list[Tensor]:
    gradient, queries, keys, values = (_with_rows(one) for one in (gradient, queries, keys, values))
    made = _fake_attention_gradients(gradient, out, log_sums, queries, keys, values)
    if not out.numel() or not keys.shape[2]:
        return [one.zero_() for one in made]
    job = _attention_job(queries, keys, values, out, log_sums, mask, causal, scale)
    job.of_out, job.of_queries, job.of_keys, job.of_values = map(_heads, (gradient, *made))
    library_or_error("matrix_attention").flatout_attention_gradients(ctypes.byref(job))
    return made


def _fake_attention(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    batch, heads, tokens, _ = queries.shape
    out = _tokens_first(queries, values.shape[-1])
    if queries.is_contiguous():  # torch's result is laid out as the queries are
        out = queries.new_empty(batch, heads, tokens, values.shape[-1])
    return out, queries.new_empty(queries.shape[:3], dtype=torch.float32)


torch.library.register_fake("flatout::attention", _fake_attention, lib=_DEFINITIONS)


def _fake_attention_gradients(
    gradient: Tensor, out: Tensor, log_sums: Tensor, queries: Tensor, keys: Tensor, values: Tensor, *_: object
) -> list[Tensor]:
    return [_tokens_first(one, one.shape[-1]) for one in (queries, keys, values)]


torch.library.register_fake("flatout::attention_gradients", _fake_attention_gradients, lib=_DEFINITIONS)


def _tokens_first(like: Tensor, features: int) -> Tensor:
    """[batch, heads, tokens, features] as a transposed [batch, tokens, heads, features]: models join the heads next."""
    batch, heads, tokens, _ = like.shape
    return like.new_empty(batch, tokens, heads, features).transpose(1, 2)


def _with_rows(heads: Tensor) -> Tensor:
    """With the features of a token next to each other."""
    return heads if heads.stride(-1) == 1 or heads.shape[-1] == 1 else heads.contiguous()


def _heads(tensor: Tensor) -> _HeadsStruct:
    return _HeadsStruct(tensor.data_ptr(), *tensor.stride()[:3])


def _attention_job(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    log_sums: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    scale: float,
) -> _AttentionStruct:
    samples, heads, tokens, features = queries.shape
    job = _AttentionStruct(*map(_heads, (queries, keys, values, out)))
    if mask is not None:
        spread = mask.expand(samples, heads, tokens, keys.shape[2])
        job.mask = _MaskStruct(mask.data_ptr(), MASK_KINDS[mask.dtype], *spread.stride())
    job.log_sums, job.scale, job.causal = pointer(log_sums), scale, causal
    job.samples, job.heads, job.query_count, job.key_count = samples, heads, tokens, keys.shape[2]
    job.features, job.value_features = features, values.shape[-1]
    job.threads = torch.get_num_threads()
    return job


def _keep_for_attention(
    ctx: _Context,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None, bool, float],
    output: tuple[Tensor, Tensor],
) -> None:
    queries, keys, values, mask, ctx.causal, ctx.scale = inputs
    out, log_sums = output
    ctx.mark_non_differentiable(log_sums)
    ctx.save_for_backward(queries, keys, values, out, log_sums, mask)


def _attention_backward(ctx: _Context, gradient: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    queries, keys, values, out, log_sums, mask = ctx.saved_tensors
    operator: Callable[..., list[Tensor]] = torch.ops.flatout.attention_gradients
    found = operator(gradient, out, log_sums, queries, keys, values, mask, ctx.causal, ctx.scale)
    return (*found, None, None, None)


torch.library.register_autograd(
    "flatout::attention", _attention_backward, setup_context=_keep_for_attention, lib=_DEFINITIONS
)
differentiated_once("attention_gradients", _DEFINITIONS)


@register_flop_formula(torch.ops.flatout.attention)
def _attention_flops(
    queries: Sequence[int], keys: Sequence[int], values: Sequence[int], *_: object, **__: object
) -> int:
    batch, heads, tokens, features = queries
    return 2 * batch * heads * tokens * keys[2] * (features + values[3])


@register_flop_formula(torch.ops.flatout.attention_gradients)
def _attention_gradients_flops(
    gradient: object,
    out: object,
    log_sums: object,
    queries: Sequence[int],
    keys: Sequence[int],
    values: Sequence[int],
    *_: object,
    **__: object,
) -> int:
    """Five products instead of two: the scores are computed again, as torch counts it."""
    return _attention_flops(queries, keys, values) * 5 // 2


def packed_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Sequence[int],
    *,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Attention within each of the sequences that lie one after another: bf16 [1, heads, tokens, features].

    keys and values: of the same tokens. lengths: of the sequences; tokens behind the last one get zeros.
    """
    operator: Callable[..., Tensor] = torch.ops.flatout.packed_attention
    factor = 1 / math.sqrt(queries.shape[-1]) if scale is None else scale
    return operator(queries, keys, values, lengths, causal, factor)


@torch.library.impl(_DEFINITIONS, "packed_attention", "CPU")
def _packed_attention(
    queries: Tensor, keys: Tensor, values: Tensor, lengths: Sequence[int], causal: bool, scale: float
) -> Tensor:
    if sum(lengths) > queries.shape[2]:
        raise UsageError(f"the lengths sum up to {sum(lengths)}", limit=f"the row has {queries.shape[2]} tokens")
    queries, keys, values = (_with_rows(one) for one in (queries, keys, values))
    out = _tokens_first(queries, values.shape[-1])
    starts = [0, *itertools.accumulate(lengths)]
    out[:, :, starts[-1] :] = 0
    if out.numel():
        job = _attention_job(queries, keys, values, out, None, None, causal, scale)
        numbers = ctypes.c_int64 * len(lengths)
        library_or_error("matrix_attention").flatout_packed_attention(
            ctypes.byref(job), numbers(*starts[:-1]), numbers(*lengths), ctypes.c_int64(len(lengths))
        )
    return out


torch.library.register_fake(
    "flatout::packed_attention",
    lambda queries, keys, values, *_: _tokens_first(queries, values.shape[-1]),
    lib=_DEFINITIONS,
)


def _no_gradient(ctx: _Context, gradient: Tensor) -> None:
    raise UsageError("packed_attention has no gradient", limit="it is for inference", remedy="use attention")


torch.library.register_autograd("flatout::packed_attention", _no_gradient, lib=_DEFINITIONS)


@register_flop_formula(torch.ops.flatout.packed_attention)
def _packed_attention_flops(
    queries: Sequence[int],
    keys: Sequence[int],
    values: Sequence[int],
    lengths: Sequence[int],
    *_: object,
    **__: object,
) -> int:
    return 2 * queries[1] * sum(length * length for length in lengths) * (queries[3] + values[3])


# GELU


class _ElementsStruct(ctypes.Structure):
    """`Elements` of native_sources/activation.cpp."""

    _fields_ = (*pointers("x gradient out"), *whole_numbers("element count threads"))


gelu_tanh: Callable[[Tensor], Tensor] = torch.ops.flatout.gelu_tanh
"""torch.nn.functional.gelu(x, approximate="tanh") of fp32 or bf16, of any shape."""


@torch.library.impl(_DEFINITIONS, "gelu_tanh", "CPU")
def _gelu_tanh(x: Tensor) -> Tensor:
    return _by_element(x, None)


@torch.library.impl(_DEFINITIONS, "gelu_tanh_gradient", "CPU")
def _gelu_tanh_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    return _by_element(x, gradient)


def _by_element(x: Tensor, gradient: Tensor | None) -> Tensor:
    out = torch.empty_like(x)  # laid out as torch's result is: as x, unless x has gaps
    x, gradient = _laid_out(x, out), None if gradient is None else _laid_out(gradient, out)
    numbers = (ELEMENTS[x.dtype], x.numel(), torch.get_num_threads())
    job = _ElementsStruct(pointer(x), pointer(gradient), pointer(out), *numbers)
    library_or_error("activation").flatout_gelu_tanh(ctypes.byref(job))
    return out


def _laid_out(other: Tensor, like: Tensor) -> Tensor:
    return other if other.stride() == like.stride() else torch.empty_like(like).copy_(other)


torch.library.register_fake("flatout::gelu_tanh", torch.empty_like, lib=_DEFINITIONS)
torch.library.register_fake("flatout::gelu_tanh_gradient", lambda _, x: torch.empty_like(x), lib=_DEFINITIONS)


def _keep_for_gelu(ctx: _Context, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gelu_backward(ctx: _Context, gradient: Tensor) -> Tensor:
    operator: Callable[..., Tensor] = torch.ops.flatout.gelu_tanh_gradient
    return operator(gradient, *ctx.saved_tensors)


torch.library.register_autograd("flatout::gelu_tanh", _gelu_backward, setup_context=_keep_for_gelu, lib=_DEFINITIONS)
differentiated_once("gelu_tanh_gradient", _DEFINITIONS)
