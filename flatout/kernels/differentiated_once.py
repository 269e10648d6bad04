"""Operators whose gradients cannot be differentiated again: that is an error, where torch would return zeros."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from flatout.errors import UsageError


def differentiated_once(name: str, library: torch.library.Library) -> None:
    """Of the operator of this name, which computes the gradients of another: it raises UsageError when gradients of its
    results are requested. Without that torch warns, and returns zeros."""

    def backward(context: object, *gradients: Tensor) -> None:
        raise UsageError(
            f"flatout::{name} has no gradient",
            limit="Flatout's kernels can be differentiated once, and this is a gradient of a gradient",
            remedy="drop `kernels` and `normalization` from the plan, or compute that loss without them",
        )

    torch.library.register_autograd(f"flatout::{name}", backward, lib=library)


class OnceContext(Protocol):
    """torch.autograd.function.FunctionCtx of such a function."""

    needs_input_grad: tuple[bool, ...]
    origin: Tensor | None

    def set_materialize_grads(self, value: bool) -> None: ...


_Backward = Callable[..., tuple[Tensor | None, ...]]


def origin_of(*inputs: Tensor | None) -> Tensor | None:
    """An empty tensor whose graph leads to the inputs that require a gradient, without holding them; else None.

    The last input of an autograd.Function whose `backward` is `once_differentiated`.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():  # compiled code refuses second gradients itself
        return None
    ends = [one[..., :0].flatten() for one in inputs if one is not None and one.requires_grad]
    return torch.cat(ends) if ends else None


def keep_origin(context: OnceContext, origin: Tensor | None) -> None:
    """In the forward pass of such a function."""
    context.origin = origin
    if origin is not None:  # zeros in place of no gradient would count as constants
        context.set_materialize_grads(False)


def once_differentiated(backward: _Backward) -> _Backward:
    """Decorates `backward` of an autograd.Function: gradients of the gradients that it returns are an error.

    torch's own `once_differentiable` sees to that only where the gradient from above requires one itself. That of a
    loss, the last result, is a constant: its gradients would count as constants too, and a penalty on them, or a
    Hessian, would silently be zero.
    """

    @functools.wraps(backward)
    def without_graph(context: OnceContext, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return (None,) * len(context.needs_input_grad)
        with torch.no_grad():
            found = backward(context, gradient)
        if context.origin is None or not torch.is_grad_enabled():
            return found
        return tuple(None if one is None else _constant(one, context.origin, gradient) for one in found)

    return without_graph


class _Constant(torch.autograd.Function):
    """A gradient that depends on more than its graph says."""

    @staticmethod
    def forward(context: object, found: Tensor, origin: Tensor, gradient: Tensor) -> Tensor:
        return found.view_as(found)

    @staticmethod
    def backward(context: object, *gradients: Tensor) -> None:
        raise UsageError(
            "linear_cross_entropy's gradient has no gradient",
            limit="it can be differentiated once, and this is a gradient of a gradient",
            remedy="compute this loss by torch.nn.functional's linear and cross_entropy",
        )


_constant: Callable[[Tensor, Tensor, Tensor], Tensor] = _Constant.apply
