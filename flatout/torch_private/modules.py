"""Base classes of layers, and torch's hooks around every optimizer's step. Importing this imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer

from flatout.torch_private.lookup import private

BatchNorm: type[nn.BatchNorm2d] = private("torch.nn.modules.batchnorm._BatchNorm")
Convolution: type[nn.Conv2d] = private("torch.nn.modules.conv._ConvNd")
Loss: type[nn.Module] = private("torch.nn.modules.loss._Loss")
"""All of a kind; a list of the public classes would miss a new one. Declared as one of the kind, whose attributes all
of it have."""

Hooks = dict[Any, Callable[..., Any]]  # Any: keys are torch's own, and a hook may return anything

OPTIMIZER_PRE_HOOKS: Hooks = private("torch.optim.optimizer._global_optimizer_pre_hooks")
OPTIMIZER_POST_HOOKS: Hooks = private("torch.optim.optimizer._global_optimizer_post_hooks")
"""The public functions that add a hook take one of the numbers that also name the script's own hooks, and tell nobody
whether there are any."""


def step_hooks_of(optimizer: Optimizer) -> Iterator[Callable[..., Any]]:  # Any: see above
    """Hooks around the step of this one; the public functions only add."""
    yield from optimizer._optimizer_step_pre_hooks.values()
    yield from optimizer._optimizer_step_post_hooks.values()
