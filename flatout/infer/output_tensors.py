"""The tensors in what a model returns: containers and dataclasses of any depth."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeGuard

from torch import Tensor

from flatout.data.nested import leaves_in


def is_tensor(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor)


def output_tensors(output: object) -> Iterator[tuple[str, Tensor]]:
    """Each tensor with the expression that leads to it: `output`, `output[0]['x']`."""
    return leaves_in(output, "output", is_tensor)
