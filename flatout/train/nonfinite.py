"""Losses and weights that are inf or NaN, noticed without waiting for the device.

Losses are kept for some steps and looked at together: on CUDA they are copied to the host meanwhile, and read when they
have arrived. So the first one is named by its step, if some steps later.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Iterable
from typing import Any

from flatout.errors import NumericsError

STEPS_PER_LOOK = 32


class LossWatch:
    """Counts losses that are not finite, and warns of the first by its step's number."""

    def __init__(self) -> None:
        self.count = 0
        self.first: int | None = None
        """The first step whose loss was not finite; None: there is none, as far as is known."""
        self._steps_since, self._count_since = 0, 0
        self._held: list[tuple[int, Any]] = []
        self._asked: deque[tuple[list[int], Any, Any]] = deque()

    def add(self, step: int, loss: Any) -> None:
        import torch

        if type(loss) is not torch.Tensor:  # a fake tensor of a forecast has no value
            return
        self._steps_since += 1
        self._held.append((step, loss))
        if len(self._held) >= STEPS_PER_LOOK:
            self._ask()
            self._read(wait=False)

    def look(self) -> None:
        """Until all is known. Waits for the device."""
        if self._held:
            self._ask()
        self._read(wait=True)

    def none_finite_since(self) -> bool:
        """Was no loss finite since the last call of `begin`? Waits for the device."""
        self.look()
        return 0 < self._steps_since == self._count_since

    def begin(self) -> None:
        """What `none_finite_since` speaks of begins here."""
        self._steps_since = self._count_since = 0

    def _ask(self) -> None:
        import torch

        steps, losses = zip(*self._held, strict=True)
        self._held = []
        values = torch.stack(losses)
        if values.device.type != "cuda":
            self._asked.append((list(steps), values, None))
            return
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._asked.append((list(steps), host, event))

    def _read(self, *, wait: bool) -> None:
        while self._asked:
            steps, host, event = self._asked[0]
            if event is not None and not wait and not event.query():
                return
            if event is not None:
                event.synchronize()
            self._asked.popleft()
            for step, value in zip(steps, host.tolist(), strict=True):
                self._note(step, value)

    def _note(self, step: int, value: float) -> None:
        if math.isfinite(value):
            return
        self.count += 1
        self._count_since += 1
        if self.first is None:
            self.first = step
            warnings.warn(
                f"the loss of step {step} is {value}: look at that step's batch and learning rate; "
                "Plan(nonfinite='raise') ends the run at such a step, 'skip' leaves it out",
                stacklevel=4,
            )


def check_weights_finite(weights: Iterable[tuple[str, Any]], watch: LossWatch) -> None:
    """Raise NumericsError if one of these tensors holds inf or NaN. Waits for the device."""
    import torch

    held = [(name, one) for name, one in weights if one.is_floating_point() or one.is_complex()]
    flags = [getattr(one, "to_local", lambda one=one: one)().detach().isfinite().all() for _, one in held]
    if not flags or bool(torch.stack([flag.to(flags[0].device) for flag in flags]).all()):
        return
    name = next(name for (name, _), flag in zip(held, flags, strict=True) if not flag)
    watch.look()
    since = "" if watch.first is None else f"; the loss was not finite at step {watch.first} for the first time"
    raise NumericsError(
        f"the weights are not finite ({name}){since}",
        limit="training cannot recover from that, and no checkpoint is made of it: the ones before are kept",
        remedy="go on from the last checkpoint with a lower learning rate, clip_norm, or Plan(nonfinite='skip')",
    )
