"""Tensors in a model's output: replaced in nested containers and dataclasses, and compared."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from torch import Tensor

from flatout.torch_private.late import dispatch


def outputs_changed(result: object, change: Callable[[Tensor], object]) -> object:
    """`result` with `change(tensor)` for each tensor in it; everything else as it is."""
    import torch

    def convert(leaf: object) -> object:
        if isinstance(leaf, torch.Tensor):
            return change(leaf)
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            return _dataclass_changed(leaf, change)
        return leaf

    return dispatch().tree_map(convert, result)


def _dataclass_changed(result: DataclassInstance, change: Callable[[Tensor], object]) -> object:
    """A copy with other field values, made without `__init__`, which may compute or refuse."""
    changed = copy.copy(result)
    for field in dataclasses.fields(result):
        if hasattr(result, field.name):
            object.__setattr__(changed, field.name, outputs_changed(getattr(result, field.name), change))
    return changed


def difference(found: Tensor, wanted: Tensor) -> float:
    """Between outputs of one shape, as a share of their spread: rounding in fp32 is far below 0.001, others are 1.4."""
    found, wanted = found.float(), wanted.float()
    spread = max(float(wanted.std(correction=0)), 1e-4 * float(wanted.abs().max()), 1e-30)
    return float((found - wanted).square().mean().sqrt()) / spread
