"""Autocast around a model's call, and loss scaling for fp16."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from flatout.parameters import all_parameters
from flatout.precision.outputs import outputs_changed

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

    Losses = Tensor | Sequence[Tensor]

DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


def autocast_call(precision: str) -> Callable[[nn.Module, Callable[[], object]], object]:
    """A wrapper for outermost module calls: autocast inside, fp32 outside.

    A loss without weights stays as it is, and so does a module whose weights are not fp32, whose outputs are of its own
    dtype, and a call that stands in autocast already: that one is the caller's.
    """
    import torch

    dtype = getattr(torch, DTYPES[precision])

    def wrapper(module: nn.Module, call: Callable[[], object]) -> object:
        weight = next(module.parameters(), None)
        if weight is None or weight.dtype != torch.float32 or torch.is_autocast_enabled(weight.device.type):
            return call()
        with torch.autocast(weight.device.type, dtype=dtype):
            result = call()
        return in_fp32(result, dtype)

    return wrapper


def not_in_fp32(module: nn.Module) -> str:
    """Why `autocast_call` leaves a module as it is; '' where it does not."""
    import torch

    dtype = next((one.dtype for one in module.parameters()), torch.float32)
    if dtype == torch.float32:
        return ""
    return f"autocast is for weights in fp32, and the model's are {str(dtype).removeprefix('torch.')}"


def in_fp32(result: object, dtype: torch.dtype) -> object:
    """Tensors of `dtype` anywhere in `result` as fp32; everything else as it is."""
    return outputs_changed(result, lambda tensor: tensor.float() if tensor.dtype == dtype else tensor)


def in_autocast_of_caller(call: Callable[..., object]) -> Callable[..., object]:
    """`call`, for another thread, under the autocast that this one is under now. Each thread has its own: those of
    torch's DataParallel have it switched on like their caller, but in torch's default dtype, fp16."""
    import torch

    enabled, dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")

    def called(*args: object, **kwargs: object) -> object:
        with torch.autocast("cuda", dtype=dtype, enabled=enabled):
            return call(*args, **kwargs)

    return called


def copies_in_autocast_of_caller(parallel_apply: Callable[..., object]) -> Callable[..., object]:
    """DataParallel's method of this name, whose copies of the model compute in the caller's dtype."""

    def applied(self: object, replicas: Sequence[nn.Module], *args: object, **kwargs: object) -> object:
        return parallel_apply(self, [in_autocast_of_caller(one) for one in replicas], *args, **kwargs)

    return applied


FIRST_SCALE = 2.0**16
GROWTH_INTERVAL = 2000


def loss_scaled_backward(
    optimizers: Iterable[Optimizer], modules: Iterable[nn.Module] = ()
) -> Callable[[Losses, Callable[[Losses], object]], object]:
    """A wrapper for backward passes: scale the loss, unscale the new gradients at once.

    Every leaf of the graph is unscaled, whether or not an optimizer that owns it has been seen; `optimizers` and
    `modules` add what checkpointed parts hide from the graph.

    Unscaling right here, before the script sees a gradient, makes its own clipping and accumulation right. A pass
    that overflowed leaves no gradient and halves the scale. Asks the device once a pass whether it did.
    """
    import torch

    state = {"scale": FIRST_SCALE, "good": 0}

    def wrapper(tensors: Losses, run: Callable[[Losses], object]) -> object:
        from flatout.torch_private.tensors import foreach_mul_, foreach_norm

        roots = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        parameters = _leaves(roots, optimizers, modules)
        held = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        scale = state["scale"]
        try:
            result = run(tensors * scale if isinstance(tensors, torch.Tensor) else [t * scale for t in tensors])
        except BaseException:  # out of memory, say: what it has added is scaled, and what was there is the script's
            for parameter, old in zip(parameters, held, strict=True):
                parameter.grad = old
            raise
        fresh = [_dense(parameter.grad) for parameter in parameters if parameter.grad is not None]
        finite = all(bool(torch.isfinite(norm)) for norm in foreach_norm(fresh)) if fresh else True
        if finite:
            foreach_mul_(fresh, 1.0 / scale)
        for parameter, old in zip(parameters, held, strict=True):
            if not finite:
                parameter.grad = old
            elif old is not None:
                parameter.grad = old if parameter.grad is None else old.add_(parameter.grad)
        _adapt(state, finite)
        return result

    return wrapper


def _dense(gradient: Tensor) -> Tensor:
    """The values of a gradient, to be changed in place."""
    return gradient._values() if gradient.is_sparse else gradient


def _leaves(roots: Sequence[Tensor], optimizers: Iterable[Optimizer], modules: Iterable[nn.Module]) -> list[Tensor]:
    """Whatever this backward pass may leave a gradient in, each once."""
    found = {id(one): one for one in all_parameters(modules, optimizers)}
    waiting = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found[id(leaf)] = leaf
        fresh = [inner for inner, _ in node.next_functions if inner is not None and inner not in seen]
        seen.update(fresh)
        waiting += fresh
    return list(found.values())


def _adapt(state: dict[str, float], finite: bool) -> None:
    state["good"] = state["good"] + 1 if finite else 0
    if not finite:
        state["scale"] = max(1.0, state["scale"] / 2)
    elif state["good"] % GROWTH_INTERVAL == 0:
        state["scale"] *= 2
