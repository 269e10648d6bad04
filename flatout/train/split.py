"""When a batch does not fit: is splitting exact for this model, and what to restore after a failed attempt.

The gradients of a batch are the weighted sum of its parts' gradients unless the model mixes samples. A batch norm does
(its statistics are those of the part), so a split batch trains a slightly different model.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from flatout.generators import set_generators, torch_generator_states

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer


def batch_coupled_layers(model: Module) -> list[str]:
    """Names of the layers in training mode whose output for a sample depends on the others in its batch."""

    from flatout.torch_private.modules import BatchNorm

    coupled = (BatchNorm,)
    return [
        name or "the model" for name, layer in model.named_modules() if isinstance(layer, coupled) and layer.training
    ]


class Attempt:
    """What a forward and backward pass changes besides gradients, to be restored: torch's random states and buffers."""

    def __init__(self, model: Module, *, buffers: bool) -> None:
        self._generators = torch_generator_states()
        self._buffers = [(buffer, buffer.clone()) for buffer in model.buffers()] if buffers else []

    def put_back(self) -> None:
        import torch

        set_generators(self._generators)
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.copy_(value)


def release(model: Module, optimizer: Optimizer) -> None:
    """Free what a failed attempt left: its gradients, reference cycles of its graph, and the allocator's cache."""
    import torch

    optimizer.zero_grad(set_to_none=True)
    model.zero_grad(set_to_none=True)
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
