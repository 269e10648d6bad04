"""Base classes of layers, and hooks around the steps of optimizers. Importing this imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer

from flatout.torch_private.lookup import private

BatchNorm: type[nn.BatchNorm2d] = private("torch.nn.modules.batchnorm._BatchNorm")
NormWithStatistics: type[nn.BatchNorm2d] = private("torch.nn.modules.batchnorm._NormBase")  # instance norms too
Convolution: type[nn.Conv2d] = private("torch.nn.modules.conv._ConvNd")
Loss: type[nn.Module] = private("torch.nn.modules.loss._Loss")
"""Base classes, because a list of the public classes would miss a new one. The declared type is one of the subclasses,
which has the attributes that are common to all."""

Hooks = dict[Any, Callable[..., object]]  # Any: keys are handles of torch, and a hook may return anything

OPTIMIZER_PRE_HOOKS: Hooks = private("torch.optim.optimizer._global_optimizer_pre_hooks")
OPTIMIZER_POST_HOOKS: Hooks = private("torch.optim.optimizer._global_optimizer_post_hooks")
"""The public functions only add hooks, and number them together with those of the script."""


def step_hooks_of(optimizer: Optimizer) -> Iterator[Callable[..., object]]:  # see above
    """The hooks registered on this optimizer; the public functions only add hooks."""
    yield from optimizer._optimizer_step_pre_hooks.values()
    yield from optimizer._optimizer_step_post_hooks.values()
