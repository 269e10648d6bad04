"""Update each parameter as soon as its gradient is ready, and free that gradient: they are never all held at once.

The updates are those of the same optimizer on the same gradients, so the weights are bit-identical. Anything that needs
all gradients before the first update (clipping, scaling, checking for NaN, accumulation, DDP) rules it out, and so does
anything that could look at weights or gradients in between. A parameter whose gradient comes in several parts (a layer
in several reentrant checkpoints, a backward pass inside another) cannot be updated with the first: the second raises.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from flatout.errors import UsageError
from flatout.parameters import parameters_of
from flatout.torch_private.attributes import STEP_IS_SCHEDULED

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

BY_PARAMETER = (
    "SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD", "Adafactor"
)  # fmt: skip
"""Of torch.optim: the update of a parameter depends only on the parameter, its gradient, its state and its group."""


class UpdatesInBackward:
    """Hooks on the optimizer's parameters, until `close`."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._groups: dict[Tensor, dict[str, object]] = {}
        self._handles: dict[Tensor, RemovableHandle] = {}
        self._updated: set[int] | None = None
        """By identity, the parameters updated since `follow`; None: no pass updates anything now."""
        self.follow()

    def follow(self) -> None:
        """Take the optimizer's groups as they are now; to be called before a backward pass.

        Loading a state replaces the groups, and parameters may be added or unfrozen at any time.
        """
        self._updated = set()
        self._groups = {one: group for group in self._optimizer.param_groups for one in group["params"]}
        for parameter in self._groups:
            if parameter.requires_grad and parameter not in self._handles:
                self._handles[parameter] = parameter.register_post_accumulate_grad_hook(self.update)

    def pause(self) -> None:
        """Leave gradients where they are until the next `follow`: they are not of the passes that update, but of a
        generator's step through its discriminator, say, or of a look at the gradient of an input."""
        self._updated = None

    def close(self) -> None:
        for handle in self._handles.values():
            handle.remove()

    def update(self, parameter: Tensor) -> None:
        """Step this parameter alone, and free its gradient. UsageError for its second gradient since `follow`."""
        group = self._groups.get(parameter)
        if group is None or self._updated is None:  # it has left the optimizer
            return
        if id(parameter) in self._updated:
            raise UsageError(
                f"a parameter of shape {list(parameter.shape)} got another gradient after its update in this step",
                limit="optimizer_in_backward updates with the first gradient, which has to be the whole one",
                remedy="drop it, or use checkpoints with use_reentrant=False and no backward() inside the loss",
            )
        self._updated.add(id(parameter))
        groups = self._optimizer.param_groups
        alone = {**group, "params": [parameter]}
        self._optimizer.param_groups = [alone]
        try:
            self._optimizer.step()
        finally:
            self._optimizer.param_groups = groups
        group.update({name: value for name, value in alone.items() if name != "params"})
        parameter.grad = None


def check_in_backward(optimizer: Optimizer, model: Module, *, clip_norm: float | None, ranks: int) -> None:
    """Raises UsageError where the updates need all gradients first, or something could look in between."""
    if clip_norm is not None:
        raise UsageError(
            f"clip_norm is {clip_norm} while optimizer_in_backward is true",
            limit="the norm needs all gradients before the first update",
            remedy="drop one of the two",
        )
    if ranks > 1:
        raise UsageError(
            f"optimizer_in_backward is true over {ranks} ranks",
            limit="gradients are averaged over the ranks only after they were computed",
            remedy="drop it, or train on one device",
        )
    if obstacle := optimizer_obstacle(optimizer) or hook_obstacle([model]):
        raise UsageError(
            f"optimizer_in_backward is true, and {obstacle}",
            limit="each parameter is updated by itself, while the backward pass goes on",
            remedy="drop optimizer_in_backward",
        )


def optimizer_obstacle(optimizer: Optimizer) -> str:
    """Why this optimizer's parameters cannot be updated one by one in a backward pass; '' if they can."""
    import torch

    kind = type(optimizer)
    if kind not in {getattr(torch.optim, name) for name in BY_PARAMETER}:
        return f"{kind.__name__} is not known to update each parameter independently"
    own = vars(optimizer).get("step")
    if own is not None and not hasattr(own, STEP_IS_SCHEDULED):
        return "the optimizer's step was replaced"
    if any(group.get("differentiable") or group.get("capturable") for group in optimizer.param_groups):
        return "the optimizer is differentiable or capturable"
    if _foreign_hooks(optimizer):
        return "there are hooks around the optimizer's step"
    parameters = parameters_of(optimizer)
    plain = [one for one in parameters if type(one) is torch.nn.Parameter and one.layout is torch.strided]
    if len(plain) < len(parameters) and not _are_fake(parameters):
        return "its parameters are not plain torch.nn.Parameter"
    if any(one._post_accumulate_grad_hooks for one in parameters):
        return "there are post-accumulate-grad hooks"
    if _overlap(plain):
        return "parameters share memory"
    return ""


def hook_obstacle(models: Iterable[Module]) -> str:
    """Which layer of these models has a hook that could look at weights during the backward pass; '' if none has."""
    for model in models:
        for part in model.modules():
            if part._backward_hooks or part._backward_pre_hooks:
                return f"{type(part).__name__} has a backward hook"
    return ""


def _foreign_hooks(optimizer: Optimizer) -> bool:
    from flatout.torch_private.modules import OPTIMIZER_POST_HOOKS, OPTIMIZER_PRE_HOOKS, step_hooks_of

    hooks = (*step_hooks_of(optimizer), *OPTIMIZER_PRE_HOOKS.values(), *OPTIMIZER_POST_HOOKS.values())
    return any(not (getattr(one, "__module__", None) or "").startswith("flatout.") for one in hooks)


def _are_fake(parameters: Sequence[Tensor]) -> bool:
    """A forecast's copies, which stand for plain parameters."""
    from flatout.memory.fake_run import is_fake

    return all(is_fake(one) for one in parameters)


def _overlap(parameters: Sequence[Tensor]) -> bool:
    """Would the update of one parameter change another's values?"""
    ranges = sorted((one.data_ptr(), one.data_ptr() + one.nbytes) for one in parameters if one.nbytes)
    return any(after < end for (_, end), (after, _) in itertools.pairwise(ranges))
