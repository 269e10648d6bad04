"""Parameters that the optimizer trains and the model does not have, such as a temperature or class centres of the loss.

Strategies see to the model's parameters. These are made the same on all ranks, and their gradients averaged, here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from flatout.errors import UsageError
from flatout.parallel.whole_tensors import is_distributed
from flatout.parameters import parameters_of

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.nn import Module
    from torch.optim import Optimizer


def beside_model(model: Module, optimizer: Optimizer) -> list[Tensor]:
    """Those parameters, but for any that are spread over ranks (DTensors): whoever spreads them sees to them."""
    own = {id(one) for one in model.parameters()}
    return [one for one in parameters_of(optimizer) if id(one) not in own and not is_distributed(one)]


def refuse_beside_model(model: Module, optimizer: Optimizer, parallel: str) -> None:
    """UsageError where there are any.

    Under "tensor" and "pipeline" a rank computes a part of the loss, or none, and so of their gradients. Under "fsdp"
    torch's kernels for GPUs clip and update all of a group at once, and take no whole tensors beside DTensors.
    """
    found = beside_model(model, optimizer)
    if found:
        raise UsageError(
            f"the optimizer trains a parameter of shape {list(found[0].shape)} that is not the model's",
            limit=f"parallel = {parallel!r} shares the training of the model alone",
            remedy="use parallel = 'ddp' or 'zero1', or make it a parameter that the model uses in its forward",
        )


def averaged_beside_model(model: Module, optimizer: Optimizer, group: ProcessGroup) -> Callable[[], None]:
    """Begin with rank 0's values, a collective. Returns what averages the gradients of a step, which is one too."""
    from flatout.parallel.averaging import average_gradients, sent_by_first

    sent_by_first(beside_model(model, optimizer))
    known = -1
    beside: list[Tensor] = []

    def average() -> None:
        nonlocal known, beside
        moved = len(parameters_of(optimizer))
        if moved != known:  # a group may join later
            known, beside = moved, beside_model(model, optimizer)
        average_gradients(beside, group)

    return average
