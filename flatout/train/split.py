"""When a batch does not fit: is splitting exact for this model, and what a failed try has to give back.

The gradients of a batch are the weighted sum of its parts' gradients as long as samples do not meet inside the model.
In a batch norm they do (its statistics are those of the part), so a split batch trains a slightly different model.
"""

from __future__ import annotations

import gc
from typing import Any

from flatout.generators import set_generators, torch_generator_states


def batch_coupled_layers(model: Any) -> list[str]:
    """Names of the layers in training mode whose output for one sample depends on the others of its batch."""

    from flatout.torch_private.modules import BatchNorm

    coupled = (BatchNorm,)
    return [
        name or "the model" for name, layer in model.named_modules() if isinstance(layer, coupled) and layer.training
    ]


class Attempt:
    """What a forward and backward pass changes besides gradients: torch's random states and buffers, to be put back."""

    def __init__(self, model: Any, *, buffers: bool) -> None:
        self._generators = torch_generator_states()
        self._buffers = [(buffer, buffer.clone()) for buffer in model.buffers()] if buffers else []

    def put_back(self) -> None:
        import torch

        set_generators(self._generators)
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.copy_(value)


def release(model: Any, optimizer: Any) -> None:
    """Free what a failed try left: its gradients, the cycles of its graph, and the allocator's cache."""
    import torch

    optimizer.zero_grad(set_to_none=True)
    model.zero_grad(set_to_none=True)
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
