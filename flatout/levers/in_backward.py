"""Update each parameter as soon as its gradient is ready, and free that gradient: they are never all held at once.

The updates are those of the same optimizer on the same gradients, so the weights are bit-identical. Anything that needs
all gradients before the first update (clipping, scaling, checking for NaN, accumulation, DDP) rules it out.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from flatout.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer


class UpdatesInBackward:
    """Hooks on the optimizer's parameters, until `close`."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._handles = [
            parameter.register_post_accumulate_grad_hook(functools.partial(self.update, group))
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        ]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def update(self, group: dict[str, object], parameter: Tensor) -> None:
        """Step this parameter alone, which is in `group`, and free its gradient."""
        groups = self._optimizer.param_groups
        alone = {**group, "params": [parameter]}
        self._optimizer.param_groups = [alone]
        try:
            self._optimizer.step()
        finally:
            self._optimizer.param_groups = groups
        group.update({name: value for name, value in alone.items() if name != "params"})
        parameter.grad = None


def check_in_backward(*, clip_norm: float | None, ranks: int) -> None:
    """Raises UsageError where the updates need all gradients first."""
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
