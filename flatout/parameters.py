"""The parameters that optimizers and models hold, in their order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """What the optimizer updates, group by group."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def all_parameters(modules: Iterable[Module], optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Of all of them, each once."""
    found: dict[int, Tensor] = {id(one): one for module in modules for one in module.parameters()}
    found |= {id(one): one for optimizer in optimizers for one in parameters_of(optimizer)}
    return list(found.values())


def own_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that is spread over ranks (a DTensor), in the same memory; any other one itself."""
    to_local = getattr(tensor, "to_local", None)  # `isinstance` would import torch.distributed.tensor everywhere
    return tensor if to_local is None else to_local()
