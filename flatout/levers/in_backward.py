"""Update each parameter as soon as its gradient is there, and free that gradient: never are all of them held at once.

The updates are those of the same optimizer on the same gradients, so the weights keep their bits. What needs all
gradients before the first update (clipping, scaling, looking for NaN, accumulation, DDP) cannot be had with it.
"""

from __future__ import annotations

import functools
from typing import Any

from flatout.errors import UsageError


class UpdatesInBackward:
    """Hooks on the optimizer's parameters, until `close`."""

    def __init__(self, optimizer: Any) -> None:
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

    def update(self, group: dict[str, Any], parameter: Any) -> None:
        """One step of this parameter alone, which is in `group`; its gradient is gone then."""
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
    if clip_norm is not None:
        raise UsageError(
            f"clip_norm is {clip_norm} while optimizer_in_backward is true",
            limit="the norm needs all gradients before the first update",
            remedy="drop one of the two",
        )
    if ranks > 1:
        raise UsageError(
            f"optimizer_in_backward is true over {ranks} ranks",
            limit="gradients are averaged over the ranks only after they are there",
            remedy="drop it, or train on one device",
        )
