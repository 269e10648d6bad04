"""Losses and weights that are inf or NaN, noticed without waiting for the device.

Losses are kept for some steps and read together, so the warning names the step of the first one some steps later.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING

from flatout.errors import NumericsError
from flatout.parameters import own_part
from flatout.train.readings import Readings

if TYPE_CHECKING:
    from torch import Tensor


class LossWatch:
    """Counts losses that are not finite, and warns of the first with its step's number."""

    def __init__(self) -> None:
        self.count = 0
        self.first: int | None = None
        """The first step whose loss was not finite; None if none is known."""
        self._steps_since, self._count_since = 0, 0
        self._readings: Readings[int] = Readings(lambda step, values: self._note(step, values[0]))

    def add(self, step: int, loss: Tensor) -> None:
        import torch

        if type(loss) is not torch.Tensor:  # a fake tensor of a forecast has no value
            return
        self._steps_since += 1
        self._readings.add(step, [loss])

    def look(self) -> None:
        """Read all losses. Waits for the device."""
        self._readings.read()

    def none_finite_since(self) -> bool:
        """Was no loss finite since the last call of `begin`? Waits for the device."""
        self.look()
        return 0 < self._steps_since == self._count_since

    def begin(self) -> None:
        """Start the period of `none_finite_since`."""
        self._steps_since = self._count_since = 0

    def _note(self, step: int, value: float) -> None:
        if math.isfinite(value):
            return
        self.count += 1
        self._count_since += 1
        if self.first is None:
            self.first = step
            warnings.warn(
                f"the loss of step {step} is {value}: check that step's batch and learning rate; "
                "Plan(nonfinite='raise') ends the run at such a step, 'skip' skips its update",
                stacklevel=4,
            )


def check_weights_finite(weights: Iterable[tuple[str, Tensor]], watch: LossWatch) -> None:
    """Raise NumericsError if one of these tensors holds inf or NaN. Waits for the device."""
    import torch

    held = [(name, one) for name, one in weights if one.is_floating_point() or one.is_complex()]
    flags = [own_part(one).detach().isfinite().all() for _, one in held]
    if not flags or bool(torch.stack([flag.to(flags[0].device) for flag in flags]).all()):
        return
    name = next(name for (name, _), flag in zip(held, flags, strict=True) if not flag)
    watch.look()
    since = "" if watch.first is None else f"; the loss was not finite at step {watch.first} for the first time"
    raise NumericsError(
        f"the weights are not finite ({name}){since}",
        limit="training cannot recover from that, and it is not saved: earlier checkpoints are kept",
        remedy="resume from the last checkpoint with a lower learning rate, clip_norm, or Plan(nonfinite='skip')",
    )
