"""Are the gradients of a script's 16-bit LSTM layers right? Each size of layer that trained on the CPU, tried alone.

What a layer computes in the script cannot be compared without a second pass in fp32, whereas the fault depends on
nothing but sizes, dtype, processor and torch (see `precision/recurrent.py`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from flatout.precision.recurrent import gradient_error
from flatout.script.behaviour_seen import RecurrentSeen

if TYPE_CHECKING:
    from torch import nn

MOST_SIZES = 4


class _Size(NamedTuple):
    inputs: int
    units: int


class RecurrentLayers:
    """`note` is a forward pre-hook of LSTM layers; `tried` when the window is over."""

    def __init__(self) -> None:
        self._sizes: dict[_Size, None] = {}

    def note(self, module: nn.Module) -> None:
        import torch
        from torch import nn

        if not isinstance(module, nn.LSTM) or not module.training or not torch.is_grad_enabled():
            return
        weight = module.weight_hh_l0
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else weight.dtype
        if weight.device.type == "cpu" and dtype == torch.bfloat16 and len(self._sizes) < MOST_SIZES:
            self._sizes[_Size(module.input_size, module.hidden_size)] = None

    def tried(self) -> tuple[RecurrentSeen, ...]:
        import torch

        found = []
        for inputs, units in self._sizes:
            error = gradient_error(inputs, units, torch.bfloat16)
            if math.isfinite(error):  # otherwise torch has no such layer, and the script has failed
                found.append(RecurrentSeen(inputs=inputs, units=units, dtype="bfloat16", gradient_error=error))
        return tuple(found)
