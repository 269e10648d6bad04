"""The optimizer's step as one kernel ('fused') or one per operation ('foreach') instead of a loop over tensors.

The flags are set just for the duration of each step, so a state dict that the script saves never shows them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from flatout.levers.lever import Lever, Verdict, offer, refuse
from flatout.levers.observed import Observed, OptimizerSeen
from flatout.levers.subject import Subject, Undo
from flatout.machine.description import Machine

STEP_SHARE_WORTH_TRYING = 0.02


class FusedOptimizer(Lever):
    """Applies to torch's own optimizers where the script left the choice of implementation to torch."""

    name = "optimizer"
    plan_field = "optimizer"
    exactness = "rounding"

    def applies(self, machine: Machine, observed: Observed) -> Verdict:
        if not observed.optimizers:
            return refuse("the script has no optimizer object")
        share = observed.share("optimizer")
        if share is not None and share < STEP_SHARE_WORTH_TRYING:
            return refuse(f"the optimizer takes {share:.1%} of a step")
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
    flags = {"fused": value == "fused", "foreach": value == "foreach"}

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            group.update(flags)
        _move_step_counters(optimizer, to_device=value == "fused")

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            group.update(fused=None, foreach=None)

    hooks = (optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after))

    def undo(optimizer: Any) -> None:
        for hook in hooks:
            hook.remove()
        _move_step_counters(optimizer, to_device=False)

    return undo


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
        can_fuse=kind in fusable and "fused" in groups[0],
        can_foreach=kind.__module__.startswith("torch.optim") and "foreach" in groups[0],
        sparse_gradients=sparse,
        obstacle=obstacle,
    )
