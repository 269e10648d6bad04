"""When a batch does not fit: is splitting exact for this model, and what to restore after a failed attempt.

The gradients of a batch are the weighted sum of its parts' gradients unless the model mixes samples. A batch norm does
(its statistics are those of the part), so a split batch trains a slightly different model.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeAlias

from flatout.generators import set_generators, torch_generator_states

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer


def batch_coupled_layers(model: Module) -> list[str]:
    """Names of the layers in training mode whose output for a sample depends on the others in its batch."""

    from flatout.torch_private.modules import BatchNorm

    coupled = (BatchNorm,)
    return [
        name or "the model" for name, layer in model.named_modules() if isinstance(layer, coupled) and layer.training
    ]


Buffer: TypeAlias = "tuple[Module, str]"
"""A layer, and the name of its buffer."""


def buffers_of(model: Module) -> list[Buffer]:
    return [(layer, name) for layer in model.modules() for name, _ in layer.named_buffers(recurse=False)]


class Attempt:
    """What a forward and backward pass changes besides gradients, to be restored: torch's random states and buffers."""

    def __init__(self, buffers: Iterable[Buffer]) -> None:
        self._generators = torch_generator_states()
        self._buffers: list[tuple[Module, str, Tensor, int, Tensor]] = [
            (layer, name, buffer, buffer._version, buffer.clone())
            for layer, name in buffers
            if (buffer := getattr(layer, name, None)) is not None
        ]

    def put_back(self, *, buffers: bool = True) -> None:
        import torch

        set_generators(self._generators)
        with torch.no_grad():
            for layer, name, buffer, _, value in self._buffers if buffers else ():
                buffer.copy_(value)
                if getattr(layer, name, None) is not buffer:
                    setattr(layer, name, buffer)

    def changed(self) -> list[Buffer]:
        """Those that this attempt has changed, and those of norms, which a layer that is frozen now may change later.

        On a GPU it waits for the values: a layer may write them in a way that torch does not count.
        """
        import torch

        from flatout.torch_private.modules import NormWithStatistics

        def is_same(buffer: Tensor, version: int, value: Tensor) -> bool:
            if type(buffer) is not torch.Tensor or buffer.layout is not torch.strided:  # a forecast's has no values
                return buffer._version == version
            return torch.equal(buffer, value)

        return [
            (layer, name)
            for layer, name, buffer, version, value in self._buffers
            if isinstance(layer, NormWithStatistics)
            or getattr(layer, name, None) is not buffer
            or not is_same(buffer, version, value)
        ]


def release(model: Module, optimizer: Optimizer) -> None:
    """Free what a failed attempt left: its gradients, reference cycles of its graph, and the allocator's cache."""
    import torch

    optimizer.zero_grad(set_to_none=True)
    model.zero_grad(set_to_none=True)
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
