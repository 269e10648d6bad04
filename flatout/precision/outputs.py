"""What a model returned, with some of its tensors replaced: in nests of containers and in dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

from flatout.torch_private.late import dispatch


def outputs_changed(result: Any, change: Callable[[Any], Any]) -> Any:
    """`result` with `change(tensor)` for each tensor in it; everything else as it is."""
    import torch

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return change(leaf)
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            return _dataclass_changed(leaf, change)
        return leaf

    return dispatch().tree_map(convert, result)


def _dataclass_changed(result: Any, change: Callable[[Any], Any]) -> Any:
    """A copy with other field values, made without `__init__`, which may compute or refuse."""
    changed = copy.copy(result)
    for field in dataclasses.fields(result):
        if hasattr(result, field.name):
            object.__setattr__(changed, field.name, outputs_changed(getattr(result, field.name), change))
    return changed
