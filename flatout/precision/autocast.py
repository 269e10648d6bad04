"""Autocast around a model's call, and loss scaling for fp16."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


def autocast_call(precision: str) -> Callable[[Any, Callable[[], Any]], Any]:
    """A wrapper for outermost module calls: autocast inside, fp32 outside. A loss without weights stays as it is."""
    import torch

    dtype = getattr(torch, DTYPES[precision])

    def wrapper(module: Any, call: Callable[[], Any]) -> Any:
        weight = next(module.parameters(), None)
        if weight is None:
            return call()
        with torch.autocast(weight.device.type, dtype=dtype):
            result = call()
        return in_fp32(result, dtype)

    return wrapper


def in_fp32(result: Any, dtype: Any) -> Any:
    """Tensors of `dtype` anywhere in `result` as fp32; everything else as it is."""
    import torch
    from torch.utils import _pytree as pytree

    if isinstance(result, torch.Tensor):
        return result.float() if result.dtype == dtype else result
    return pytree.tree_map_only(
        torch.Tensor, lambda tensor: tensor.float() if tensor.dtype == dtype else tensor, result
    )


FIRST_SCALE = 2.0**16
GROWTH_INTERVAL = 2000


def loss_scaled_backward(optimizers: Iterable[Any]) -> Callable[[Any, Callable[[Any], Any]], Any]:
    """A wrapper for backward passes: scale the loss, unscale the new gradients at once.

    Unscaling right here, before the script sees a gradient, makes its own clipping and accumulation right. A pass
    that overflowed leaves no gradient and halves the scale. Asks the device once a pass whether it did.
    """
    import torch

    state = {"scale": FIRST_SCALE, "good": 0}

    def wrapper(tensors: Any, run: Callable[[Any], Any]) -> Any:
        parameters = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        held = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        scale = state["scale"]
        result = run([t * scale for t in tensors] if isinstance(tensors, (list, tuple)) else tensors * scale)
        fresh = [parameter.grad for parameter in parameters if parameter.grad is not None]
        finite = all(bool(torch.isfinite(norm)) for norm in torch._foreach_norm(fresh)) if fresh else True
        if finite:
            torch._foreach_mul_(fresh, 1.0 / scale)
        for parameter, old in zip(parameters, held, strict=True):
            if not finite:
                parameter.grad = old
            elif old is not None:
                parameter.grad = old if parameter.grad is None else old.add_(parameter.grad)
        _adapt(state, finite)
        return result

    return wrapper


def _adapt(state: dict[str, float], finite: bool) -> None:
    state["good"] = state["good"] + 1 if finite else 0
    if not finite:
        state["scale"] = max(1.0, state["scale"] / 2)
    elif state["good"] % GROWTH_INTERVAL == 0:
        state["scale"] *= 2
