"""A linear layer in bf16 on the CPU's matrix units, as an operator of torch: `torch.ops.flatout.linear`.

Registered with its shapes, its gradients and its number of operations, so torch.compile, autograd, forecasts and FLOP
counters see it like torch's own. It cannot be differentiated twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from flatout.kernels.matrix_units import product

_DEFINITIONS = torch.library.Library("flatout", "FRAGMENT")
_DEFINITIONS.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_DEFINITIONS.define("linear_gradients(Tensor gradient, Tensor x, Tensor weight, bool[3] wanted) -> Tensor[]")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight^T + bias: [..., inputs] -> [..., outputs] in x's dtype, fp32 or bf16.

    weight: [outputs, inputs] and bias: [outputs], in fp32 or bf16. Products are of numbers rounded to bf16 and summed up
    in fp32; gradients come in the dtypes of x, weight and bias.
    """
    operator: Callable[..., Tensor] = torch.ops.flatout.linear
    rows = operator(x.reshape(-1, x.shape[-1]), weight, bias)
    return rows.view(*x.shape[:-1], weight.shape[0])


@torch.library.impl(_DEFINITIONS, "linear", "CPU")
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return product(x, weight.t(), x.dtype, None if bias is None else bias.float())


@torch.library.impl(_DEFINITIONS, "linear_gradients", "CPU")
def _linear_gradients(gradient: Tensor, x: Tensor, weight: Tensor, wanted: Sequence[bool]) -> list[Tensor]:
    of_x, of_weight, of_bias = wanted
    found = []
    if of_x:
        found.append(product(gradient, weight, x.dtype))
    if of_weight:
        found.append(product(gradient.t(), x, weight.dtype))
    if of_bias:
        found.append(gradient.sum(0, dtype=torch.float32))
    return found


@torch.library.register_fake("flatout::linear", lib=_DEFINITIONS)
def _fake_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@torch.library.register_fake("flatout::linear_gradients", lib=_DEFINITIONS)
def _fake_linear_gradients(gradient: Tensor, x: Tensor, weight: Tensor, wanted: Sequence[bool]) -> list[Tensor]:
    bias = gradient.new_empty(gradient.shape[1], dtype=torch.float32)
    made = (x.new_empty(x.shape), weight.new_empty(weight.shape), bias)
    return [one for one, is_wanted in zip(made, wanted, strict=True) if is_wanted]


class _Context(Protocol):
    """torch's context of both passes."""

    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Tensor, ...]
    bias_dtype: torch.dtype | None

    def save_for_backward(self, *tensors: Tensor) -> None: ...


def _setup(ctx: _Context, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    x, weight, bias = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(x, weight)


def _backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad)
    operator: Callable[..., list[Tensor]] = torch.ops.flatout.linear_gradients
    found = iter(operator(gradient, x, weight, wanted))
    of_x, of_weight, of_bias = (next(found) if one else None for one in wanted)
    if of_bias is not None and ctx.bias_dtype is not None:
        of_bias = of_bias.to(ctx.bias_dtype)
    return of_x, of_weight, of_bias


torch.library.register_autograd("flatout::linear", _backward, setup_context=_setup, lib=_DEFINITIONS)


@register_flop_formula(torch.ops.flatout.linear)
def _flops(x: Sequence[int], weight: Sequence[int], *_: object, **__: object) -> int:
    return 2 * x[0] * weight[0] * weight[1]


@register_flop_formula(torch.ops.flatout.linear_gradients)
def _flops_of_gradients(
    gradient: Sequence[int], x: Sequence[int], weight: Sequence[int], wanted: Sequence[bool], **_: object
) -> int:
    return 2 * x[0] * weight[0] * weight[1] * sum(wanted[:2])
