"""The tensors, and the other values, in what a model returns: containers and dataclasses of any depth."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TypeGuard

from torch import Tensor

from flatout.data.nested import leaves_in


def is_tensor(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor)


def output_tensors(output: object) -> Iterator[tuple[str, Tensor]]:
    """Each tensor with the expression that leads to it: `output`, `output[0]['x']`."""
    return leaves_in(output, "output", is_tensor)


def output_values(output: object) -> Iterator[tuple[str, object]]:
    """Each tensor, number, text or other object that holds no further ones, in the same way."""
    return leaves_in(output, "output", lambda value: not _is_container(value))


def _is_container(value: object) -> bool:
    dataclass = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return isinstance(value, Mapping | tuple | list) or dataclass
