"""The optimizer's step as one kernel ('fused') or one per operation ('foreach') instead of a loop over tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, ClassVar

from flatout.levers.lever import Lever, Saving, Value, Verdict, offer, refuse
from flatout.levers.low_bit import low_bit_obstacle
from flatout.levers.observed import Observed, OptimizerSeen
from flatout.levers.subject import Subject, Undo
from flatout.machine.description import Machine
from flatout.parameters import Saved, parameters_of
from flatout.precision.fused_sgd import types_lost_if_fused

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer
    from torch.optim.optimizer import Args, Kwargs


class FusedOptimizer(Lever):
    """torch's fused or foreach implementation of the optimizer's step, instead of a loop over tensors.

    Only where the script left the choice to torch. The flags are set for the duration of each step, so state dicts
    that the script saves never show them.
    """

    name = "optimizer"
    plan_field = "optimizer"
    surpassed_by: ClassVar[Mapping[Value, Value]] = {"foreach": "fused"}

    def saving(self, machine: Machine, observed: Observed) -> Saving:
        share = observed.share("optimizer")
        if share is None:
            return Saving(expected=0.05, least=-0.1, most=0.9)
        why = f"the optimizer takes {share:.1%} of a step"
        return Saving(expected=0.6 * share, least=-share, most=0.95 * share, why=why)

    def applies(self, machine: Machine, observed: Observed) -> Verdict:
        if not observed.optimizers:
            return refuse("there is no optimizer object")
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

    def apply(self, subject: Subject, value: Value) -> AbstractContextManager[None]:
        def visit(optimizer: Optimizer) -> Undo[Optimizer] | None:
            seen = see_optimizer(optimizer)
            fits = seen.can_fuse if value == "fused" else seen.can_foreach
            if not seen.obstacle and fits:
                return _switch(optimizer, str(value), subject.reporter(self.name))
            is_so_already = all(group.get(str(value)) for group in optimizer.param_groups)
            if not subject.any_model and not is_so_already:  # a script may have others that it fits
                why = f"{seen.kind} has no {value} implementation for these parameters and settings"
                if value == "fused" and _loses_updates(optimizer):
                    why = "on a CPU torch's fused SGD leaves weights in 16 bits as they are"
                why = seen.obstacle or why
                subject.note_incident(self.name, why)
            return None

        return subject.optimizers.each(visit)

    def label(self, value: Value) -> str:
        return f"{value} optimizer"


def _switch(optimizer: Optimizer, value: str, report: Callable[[str], None]) -> Undo[Optimizer]:
    flags: dict[str, bool | None] = {"fused": value == "fused", "foreach": value == "foreach"}
    unset = dict.fromkeys(flags)
    prepare = _Preparation() if value == "fused" else None

    def prepare_dense(optimizer: Optimizer) -> None:
        """Fused kernels take no sparse gradients, which only now are known to be sparse."""
        if any(one.grad is not None and one.grad.is_sparse for one in parameters_of(optimizer)):
            report("its gradients are sparse")
            _set_flags(optimizer, unset)
            _move_step_counters(optimizer, to_device=False)
        elif prepare is not None:
            prepare(optimizer)

    def before(optimizer: Optimizer, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
        _set_flags(optimizer, flags)
        if prepare is None:
            _move_step_counters(optimizer, to_device=False)
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")  # the first is the optimizer itself
        if closure is None:
            prepare_dense(optimizer)
            return None

        @functools.wraps(closure)
        def prepared() -> object:  # it computes the gradients, which can be prepared only then
            loss = closure()
            prepare_dense(optimizer)
            return loss

        others = {name: value for name, value in kwargs.items() if name != "closure"}
        return (args[0], prepared, *args[2:]), others

    def after(optimizer: Optimizer, args: Args, kwargs: Kwargs) -> None:
        _set_flags(optimizer, unset)

    hooks = (optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after))

    def undo(optimizer: Optimizer) -> None:
        for hook in hooks:
            hook.remove()
        _set_flags(optimizer, unset)  # a step that raised did not unset them
        _move_step_counters(optimizer, to_device=False)

    return undo


def _set_flags(optimizer: Optimizer, flags: Mapping[str, bool | None]) -> None:
    """Only flags that the optimizer has: a state dict gets no key that it never had."""
    for group in optimizer.param_groups:
        for name, flag in flags.items():
            if name in group:
                group[name] = flag


class _Preparation:
    """Ensures what the fused kernels assume: gradients and moments have the strides of their parameter, step counters
    are on its device, and either all parameters of a group have a momentum buffer or none has (those of a layer that
    was just unfrozen have none). It runs in every step, so it reads only the strides of each tensor."""

    def __init__(self) -> None:
        self._seen: tuple[list[int], list[int]] | None = None
        """Identity and length of each parameter's state, when `_moments` was made."""
        self._moments: list[tuple[str, ...]] = []
        """For each parameter, the state entries of its own shape."""
        self._complete = False
        """Does each of these parameters have a moment?"""

    def __call__(self, optimizer: Optimizer) -> None:
        self._look_at(optimizer.state)
        for (parameter, state), moments in zip(optimizer.state.items(), self._moments, strict=True):
            gradient = parameter.grad
            if gradient is None:
                continue
            strides = parameter.stride()
            if gradient.stride() != strides:
                parameter.grad = as_laid_out(gradient, parameter)
            for name in moments:
                if state[name].stride() != strides:
                    state[name] = as_laid_out(state[name], parameter)
            if not parameter.is_cpu:
                _move_step_counter(parameter, state, to_device=True)
        parameters = sum(len(group["params"]) for group in optimizer.param_groups)
        if len(optimizer.state) < parameters or not self._complete:
            _prepare_stateless(optimizer)

    def _look_at(self, states: Mapping[Tensor, dict[str, Tensor]]) -> None:
        seen = list(map(id, states.values())), list(map(len, states.values()))
        if seen != self._seen:
            self._moments = [_moments(parameter, state) for parameter, state in states.items()]
            self._complete = all(
                one.dim() == 0 or bool(found) for one, found in zip(states, self._moments, strict=True)
            )
            open_ones = any(value is None for state in states.values() for value in state.values())
            self._seen = None if open_ones else seen  # what is None may become a moment


def _moments(parameter: Tensor, state: Mapping[str, object]) -> tuple[str, ...]:
    import torch

    shape, tensors = parameter.shape, {name: one for name, one in state.items() if isinstance(one, torch.Tensor)}
    return tuple(name for name, one in tensors.items() if one.dim() and one.shape == shape)


def _prepare_stateless(optimizer: Optimizer) -> None:
    """Parameters before their first step, or in a group where others have a momentum buffer already."""
    for group in optimizer.param_groups:
        ready = [parameter for parameter in group["params"] if parameter.grad is not None]
        without = [one for one in ready if optimizer.state.get(one, {}).get("momentum_buffer") is None]
        for parameter in without:
            parameter.grad = as_laid_out(parameter.grad, parameter)
        if group.get("momentum") and len(without) < len(ready):
            for parameter in without:
                optimizer.state[parameter]["momentum_buffer"] = _first_momentum(parameter, group)


def as_laid_out(tensor: Tensor, model: Tensor) -> Tensor:
    """`tensor` with the strides of `model`; the same tensor if it has them already."""
    import torch

    if tensor.stride() == model.stride():
        return tensor
    return torch.empty_strided(model.shape, model.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _first_momentum(parameter: Tensor, group: Saved) -> Tensor:  # an item of param_groups
    """The buffer that the next update turns into the bare gradient: torch starts momentum without dampening."""
    assert parameter.grad is not None
    gradient = -parameter.grad if group["maximize"] else parameter.grad
    decayed = gradient.add(parameter.detach(), alpha=group["weight_decay"])
    return as_laid_out(decayed * (group["dampening"] / group["momentum"]), parameter)


def _move_step_counters(optimizer: Optimizer, *, to_device: bool) -> None:
    for parameter, state in optimizer.state.items():
        if not parameter.is_cpu:
            _move_step_counter(parameter, state, to_device=to_device)


def _move_step_counter(parameter: Tensor, state: dict[str, Tensor], *, to_device: bool) -> None:
    """On CUDA the fused kernel needs its step counters on the GPU; torch's default keeps them on the CPU."""
    step = state.get("step")
    if step is not None and hasattr(step, "device") and step.is_cpu == to_device:
        state["step"] = step.to(parameter.device if to_device else "cpu")


def see_optimizer(optimizer: Optimizer) -> OptimizerSeen:
    """Describe a live optimizer: which implementations it could use, and what rules them out."""
    import torch

    groups, parameters = optimizer.param_groups, parameters_of(optimizer)
    fusable = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
    kind = type(optimizer)
    sparse = any(parameter.grad is not None and parameter.grad.is_sparse for parameter in parameters)
    obstacle = ""
    if any(group.get("fused") is not None or group.get("foreach") is not None for group in groups):
        obstacle = "the optimizer was built with fused or foreach set"
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
        and not _loses_updates(optimizer)
        and (kind is not torch.optim.Adagrad or all(p.device.type == "cpu" for p in parameters)),
        can_foreach=kind.__module__.startswith("torch.optim")
        and "foreach" in groups[0]
        and not any(_holds_tensor(value) for group in groups for name, value in group.items() if name != "params"),
        obstacle=obstacle,
        low_bit_obstacle=low_bit_obstacle(optimizer) or "",
    )


def _is_dense(tensor: Tensor) -> bool:
    """Does it fill its memory without gaps and overlaps, in any order? Fused kernels read it as a flat array."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _loses_updates(optimizer: Optimizer) -> bool:
    """Is it an SGD that would not train all of its weights if it were fused?"""
    import torch

    return type(optimizer) is torch.optim.SGD and bool(types_lost_if_fused(parameters_of(optimizer)))


def _holds_tensor(value: object) -> bool:
    """Is it a learning rate or betas as tensors? 'foreach' rejects them."""
    import torch

    return isinstance(value, torch.Tensor) or (isinstance(value, tuple) and any(_holds_tensor(part) for part in value))
