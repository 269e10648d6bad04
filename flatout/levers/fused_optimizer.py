"""The optimizer's step as one kernel ('fused') or one per operation ('foreach') instead of a loop over tensors.

The flags are set just for the duration of each step, so a state dict that the script saves never shows them.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any

from flatout.levers.lever import Lever, Saving, Verdict, offer, refuse
from flatout.levers.observed import Observed, OptimizerSeen
from flatout.levers.subject import Subject, Undo
from flatout.machine.description import Machine


class FusedOptimizer(Lever):
    """Applies to torch's own optimizers where the script left the choice of implementation to torch."""

    name = "optimizer"
    plan_field = "optimizer"
    exactness = "rounding"

    def saving(self, machine: Machine, observed: Observed) -> Saving:
        share = observed.share("optimizer")
        if share is None:
            return Saving(expected=0.05, least=-0.1, most=0.9)
        why = f"the optimizer takes {share:.1%} of a step"
        return Saving(expected=0.6 * share, least=-share, most=0.95 * share, why=why)

    def applies(self, machine: Machine, observed: Observed) -> Verdict:
        if not observed.optimizers:
            return refuse("the script has no optimizer object")
        kinds = ", ".join(sorted({seen.kind for seen in observed.optimizers}))
        open_ones = [seen for seen in observed.optimizers if not seen.obstacle]
        if not open_ones:
            return refuse(observed.optimizers[0].obstacle)
        values = ["fused"] if any(seen.can_fuse for seen in open_ones) else []
        if observed.device == "cpu" and any(seen.can_foreach for seen in open_ones):
            values.append("foreach")  # on a GPU it is torch's default
        if not values:
            return refuse(f"{kinds} has no faster implementation here")
        return offer(*values, reason=f"{kinds} loops over {sum(seen.parameters for seen in open_ones)} tensors")

    def apply(self, subject: Subject, value: Any) -> AbstractContextManager[None]:
        def visit(optimizer: Any) -> Undo[Any] | None:
            seen = see_optimizer(optimizer)
            fits = seen.can_fuse if value == "fused" else seen.can_foreach
            return None if seen.obstacle or not fits else _switch(optimizer, value)

        return subject.optimizers.each(visit)

    def label(self, value: Any) -> str:
        return f"{value} optimizer"


def _switch(optimizer: Any, value: str) -> Undo[Any]:
    flags: dict[str, bool | None] = {"fused": value == "fused", "foreach": value == "foreach"}

    def before(optimizer: Any, args: Any, kwargs: Any) -> Any:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # the first is the optimizer itself
        _set_flags(optimizer, flags)
        _move_step_counters(optimizer, to_device=value == "fused")
        if value != "fused":
            return None
        if closure is None:
            _prepare(optimizer)
            return None
        others = {name: value for name, value in kwargs.items() if name != "closure"}
        return (args[0], _prepared(optimizer, closure), *args[2:]), others

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        _set_flags(optimizer, dict.fromkeys(flags))

    hooks = (optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after))

    def undo(optimizer: Any) -> None:
        for hook in hooks:
            hook.remove()
        _set_flags(optimizer, dict.fromkeys(flags))  # a step that raised has left them
        _move_step_counters(optimizer, to_device=False)

    return undo


def _prepared(optimizer: Any, closure: Any) -> Any:
    """A closure makes the gradients inside the step: only behind it they can be prepared."""

    @functools.wraps(closure)
    def prepared() -> Any:
        loss = closure()
        _prepare(optimizer)
        return loss

    return prepared


def _set_flags(optimizer: Any, flags: dict[str, bool | None]) -> None:
    """Only where the optimizer knows the flag: a state dict gets no key that it never had."""
    for group in optimizer.param_groups:
        group.update({name: flag for name, flag in flags.items() if name in group})


def _prepare(optimizer: Any) -> None:
    """What the fused kernels take for granted: gradients and moments lie as their parameter does, and either all
    parameters of a group have a momentum or none has (an unfrozen layer comes without)."""
    import torch

    for group in optimizer.param_groups:
        ready = [parameter for parameter in group["params"] if parameter.grad is not None]
        states = [optimizer.state.get(parameter, {}) for parameter in ready]
        for parameter, state in zip(ready, states, strict=True):
            if parameter.grad.stride() != parameter.stride():
                parameter.grad = as_laid_out(parameter.grad, parameter)
            for name, moment in state.items():
                if isinstance(moment, torch.Tensor) and moment.shape == parameter.shape and moment.dim():
                    state[name] = as_laid_out(moment, parameter)
        if group.get("momentum") and any(state.get("momentum_buffer") is not None for state in states):
            for parameter, state in zip(ready, states, strict=True):
                if state.get("momentum_buffer") is None:
                    optimizer.state[parameter]["momentum_buffer"] = _first_momentum(parameter, group)


def as_laid_out(tensor: Any, model: Any) -> Any:
    """`tensor` with the strides of `model`; itself where it has them already."""
    import torch

    if tensor.stride() == model.stride():
        return tensor
    return torch.empty_strided(model.shape, model.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _first_momentum(parameter: Any, group: dict[str, Any]) -> Any:
    """What the next update turns into the bare gradient, as torch starts a momentum: it is not dampened at first."""
    gradient = -parameter.grad if group["maximize"] else parameter.grad
    decayed = gradient.add(parameter.detach(), alpha=group["weight_decay"])
    return as_laid_out(decayed * (group["dampening"] / group["momentum"]), parameter)


def _move_step_counters(optimizer: Any, *, to_device: bool) -> None:
    """On CUDA the fused kernel wants its step counters beside the weights; torch's default keeps them on the host."""
    for parameter, state in optimizer.state.items():
        step = state.get("step")
        if parameter.device.type == "cpu" or not hasattr(step, "device"):
            continue
        wanted = parameter.device.type if to_device else "cpu"
        if step.device.type != wanted:
            state["step"] = step.to(parameter.device if to_device else "cpu")


def see_optimizer(optimizer: Any) -> OptimizerSeen:
    """Describe a live optimizer: which implementations it could use, and what stands against them."""
    import torch

    groups = optimizer.param_groups
    parameters = [parameter for group in groups for parameter in group["params"]]
    fusable = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
    kind = type(optimizer)
    sparse = any(parameter.grad is not None and parameter.grad.is_sparse for parameter in parameters)
    obstacle = ""
    if any(group.get("fused") is not None or group.get("foreach") is not None for group in groups):
        obstacle = "the script chose the optimizer's implementation itself"
    elif any(group.get("differentiable") or group.get("capturable") for group in groups):
        obstacle = "the optimizer is differentiable or capturable"
    elif sparse:
        obstacle = "its gradients are sparse"
    elif not all(type(p) in (torch.Tensor, torch.nn.Parameter) and p.is_floating_point() for p in parameters):
        obstacle = "its parameters are not plain floating point tensors"
    return OptimizerSeen(
        kind=kind.__name__,
        parameters=len(parameters),
        fused=groups[0].get("fused"),
        foreach=groups[0].get("foreach"),
        can_fuse=kind in fusable
        and "fused" in groups[0]
        and all(_is_dense(p) for p in parameters)
        and (kind is not torch.optim.Adagrad or all(p.device.type == "cpu" for p in parameters)),
        can_foreach=kind.__module__.startswith("torch.optim")
        and "foreach" in groups[0]
        and not any(_holds_tensor(value) for group in groups for name, value in group.items() if name != "params"),
        sparse_gradients=sparse,
        obstacle=obstacle,
    )


def _is_dense(tensor: Any) -> bool:
    """Does it fill its memory without gaps and overlaps, in whatever order? Fused kernels walk it flat."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _holds_tensor(value: Any) -> bool:
    """A learning rate or betas as tensors: 'foreach' refuses them."""
    import torch

    return isinstance(value, torch.Tensor) or (isinstance(value, tuple) and any(_holds_tensor(part) for part in value))
