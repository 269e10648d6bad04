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
    import torch
    from torch import nn

MOST_SIZES = 4


class _Size(NamedTuple):
    inputs: int
    units: int
    dtype: torch.dtype


class RecurrentLayers:
    """`note` is a forward pre-hook of LSTM layers; `tried` when the window is over."""

    def __init__(self) -> None:
        self._sizes: dict[_Size, None] = {}

    def note(self, module: nn.Module) -> None:
        import torch
        from torch import nn

        if not isinstance(module, nn.LSTM) or not module.training or not torch.is_grad_enabled():
            return
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else module.weight_hh_l0.dtype
        if module.weight_hh_l0.device.type == "cpu" and dtype == torch.bfloat16 and len(self._sizes) < MOST_SIZES:
            self._sizes[_Size(module.input_size, module.hidden_size, dtype)] = None

    def tried(self) -> tuple[RecurrentSeen, ...]:
        found = []
        for size in self._sizes:
            error = gradient_error(size.inputs, size.units, size.dtype)
            if math.isfinite(error):  # otherwise torch has no such layer, and the script has failed
                dtype = str(size.dtype).removeprefix("torch.")
                found.append(RecurrentSeen(inputs=size.inputs, units=size.units, dtype=dtype, gradient_error=error))
        return tuple(found)
