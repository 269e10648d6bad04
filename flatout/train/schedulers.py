"""Learning rates: which schedulers are taken, how they are stepped, and the rate that is logged."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, SupportsFloat, TypeGuard

from flatout.arguments import wrong
from flatout.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import ReduceLROnPlateau


def check_scheduler(scheduler: object, optimizer: Optimizer) -> None:
    """Refuse anything but a scheduler of this optimizer that is stepped after each step."""
    if scheduler is None:
        return
    if needs_metric(scheduler):
        raise UsageError(
            "the scheduler is ReduceLROnPlateau",
            limit="TrainStep steps its scheduler once per call, without a metric",
            remedy="pass it to flatout.fit as epoch_scheduler, or call scheduler.step(metric) after evaluating",
        )
    check_scheduler_of(optimizer, scheduler, "scheduler")


def check_scheduler_of(optimizer: Optimizer, scheduler: object, name: str) -> None:
    """Refuse anything but a scheduler of this optimizer."""
    import torch

    if isinstance(scheduler, type) or not callable(getattr(scheduler, "step", None)):
        raise wrong(name, scheduler, "it is one of torch.optim.lr_scheduler", "make it from the optimizer")
    moved = getattr(scheduler, "optimizer", optimizer)
    if isinstance(moved, torch.optim.Optimizer) and moved.param_groups is not optimizer.param_groups:
        raise UsageError(
            f"the {name} is that of another optimizer",
            limit="it would change learning rates that nothing uses",
            remedy="create it with the optimizer that is passed here",
        )


def needs_metric(scheduler: object) -> TypeGuard[ReduceLROnPlateau]:
    """Is it stepped with a figure?"""
    import torch

    return isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)


@contextlib.contextmanager
def before_any_step() -> Iterator[None]:
    """Around a scheduler's step, where the optimizer has taken none in this process: the first was skipped, or the run
    was resumed at the end of an epoch. Torch warns of a wrong order there, and the order is right."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
        yield


def learning_rate(optimizer: Optimizer) -> dict[str, Tensor | float]:
    """Of the first parameter group; empty where the optimizer has none, or makes its own ('lr': None)."""
    import torch

    rate: object = optimizer.param_groups[0].get("lr")
    if isinstance(rate, torch.Tensor):
        return {"lr": rate.clone()}
    return {"lr": float(rate)} if isinstance(rate, SupportsFloat) else {}
