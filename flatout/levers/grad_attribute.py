"""`.grad` of parameters: as torch implements it, and with Python functions in its place.

Imported when a lever is on, after the script has imported torch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from flatout.replaced import overlaid
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
