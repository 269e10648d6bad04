"""The parameters that optimizers and models hold, in their order."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

Saved: TypeAlias = Mapping[str, Any]
"""An optimizer's state dict, or an item of its param_groups: every optimizer keeps what it likes."""


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """What the optimizer updates, group by group."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def state_of(optimizer: Optimizer, parameter: Tensor) -> Mapping[str, object]:
    """What the optimizer keeps of this parameter, by name; one of a script's own may keep a tensor and no dict of them,
    which is named ''."""
    state = optimizer.state.get(parameter, {})
    return state if isinstance(state, Mapping) else {"": state}


def all_parameters(modules: Iterable[Module], optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Of all of them, each once."""
    found: dict[int, Tensor] = {id(one): one for module in modules for one in module.parameters()}
    found |= {id(one): one for optimizer in optimizers for one in parameters_of(optimizer)}
    return list(found.values())


def copy_own_attributes(optimizer: Optimizer, copied: Optimizer, memo: dict[int, object]) -> None:
    """Complete a deep copy of an optimizer, made with that memo.

    torch copies its groups, defaults and state alone; a class of the user's may need what its `__init__` set besides.
    What cannot be copied is left out, and so are functions, which may act on the original.
    """
    for name, value in list(vars(optimizer).items()):
        if name not in vars(copied) and not callable(value):
            with contextlib.suppress(Exception):
                setattr(copied, name, copy.deepcopy(value, memo))


def own_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that is spread over ranks (a DTensor), in the same memory; any other one itself."""
    to_local = getattr(tensor, "to_local", None)  # `isinstance` would import torch.distributed.tensor everywhere
    return tensor if to_local is None else to_local()


def names_of_types(dtypes: Iterable[torch.dtype]) -> tuple[str, ...]:
    """('bfloat16', 'float32'): each once, in alphabetical order."""
    return tuple(sorted({str(one).removeprefix("torch.") for one in dtypes}))
