"""`.grad` of parameters and `zero_grad` of what holds them: as torch implements them, and with others in their place.

Imported when a lever is on, after the script has imported torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from flatout.parameters import parameters_of
from flatout.replaced import overlaid, replaced
from flatout.torch_private.tensors import grad_slot

get_grad: Callable[[Tensor], Tensor | None] = grad_slot.__get__
set_grad: Callable[[Tensor, Tensor | None], None] = grad_slot.__set__
delete_grad: Callable[[Tensor], None] = grad_slot.__delete__


def grad_replaced(
    read: Callable[[Tensor], Tensor | None],
    write: Callable[[Tensor, Tensor | None], None],
    delete: Callable[[Tensor], None],
) -> AbstractContextManager[None]:
    """`.grad` of every `torch.nn.Parameter` calls these functions until the context ends."""
    return overlaid(torch.nn.Parameter, "grad", property(read, write, delete))


@contextlib.contextmanager
def zero_grad_replaced(make: Callable[[Callable[..., None]], Callable[..., None]]) -> Iterator[None]:
    """`zero_grad` of optimizers and of modules is `make(original)` until the context ends."""
    with replaced(torch.optim.Optimizer, "zero_grad", make), replaced(torch.nn.Module, "zero_grad", make):
        yield


def held_by(owner: object) -> Iterator[Tensor]:
    """The parameters of an optimizer or a module; none of anything else."""
    if isinstance(owner, torch.optim.Optimizer):
        return iter(parameters_of(owner))
    return iter(owner.parameters()) if isinstance(owner, torch.nn.Module) else iter(())
