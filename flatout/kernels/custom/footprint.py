"""How much a case takes, before any tensor of it is made.

A kernel may give far more than it takes: rows of a table by their indices, an outer product. The reference says how
much: it is run on tensors of the meta device, which have shapes and no memory.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

import torch

from flatout.kernels.custom.argument_specs import TensorArgument
from flatout.kernels.custom.definition import Definition
from flatout.torch_private.dispatch import tree_leaves

MOST_SECONDS = 2.0
"""Of all runs of a reference on the meta device: one may loop over rows in Python."""


def shape_of(argument: TensorArgument, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(sizes[one] if isinstance(one, str) else one for one in argument.dims)


def elements(definition: Definition, sizes: Mapping[str, int]) -> int:
    """Of all inputs together."""
    return sum(math.prod(shape_of(one, sizes)) for one in definition.tensors)


class Footprint:
    """Of one kernel at any sizes: elements of the inputs together, or of the outputs where those are more."""

    def __init__(self, definition: Definition) -> None:
        self._definition = definition
        self._known: dict[tuple[tuple[str, int], ...], int] = {}
        self._left = MOST_SECONDS

    def __call__(self, sizes: Mapping[str, int]) -> int:
        key = tuple(sorted(sizes.items()))
        if key not in self._known:
            self._known[key] = max(elements(self._definition, sizes), self._outputs(sizes))
        return self._known[key]

    def _outputs(self, sizes: Mapping[str, int]) -> int:
        began = time.perf_counter()
        try:
            if self._left > 0:
                return output_elements(self._definition, sizes)
        except Exception:  # the user's own code, or its shapes depend on values
            pass
        finally:
            self._left -= time.perf_counter() - began
        return self._picked(sizes)

    def _picked(self, sizes: Mapping[str, int]) -> int:
        """Where the reference does not say: as if each index picked a row of the largest tensor it may be meant for."""
        total = 0
        for index in self._definition.tensors:
            name = index.high
            if isinstance(name, str) and sizes[name]:
                tables = [shape_of(one, sizes) for one in self._definition.tensors if name in one.dims]
                row = max((math.prod(shape) // sizes[name] for shape in tables), default=1)
                total += math.prod(shape_of(index, sizes)) * row
        return total


def output_elements(definition: Definition, sizes: Mapping[str, int]) -> int:
    """Of all that the reference returns. Raises what it raises on the meta device."""
    given = [
        torch.empty(
            shape_of(one, sizes),
            dtype=getattr(torch, definition.dtypes[0] if one.dtype == "float" else one.dtype),
            device="meta",
        )
        if isinstance(one, TensorArgument)
        else one.value
        for one in definition.arguments
    ]
    with torch.no_grad():
        returned = tree_leaves(definition.reference(*given))
    return sum(one.numel() for one in returned if isinstance(one, torch.Tensor))
