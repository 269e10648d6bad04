"""After backward: unscale, look for inf and NaN, clip, step. In this order, and without asking the device for a value.

Clipping before unscaling would clip scaled gradients: by far too much. Looking first and clipping then costs one norm
for both. Where the optimizer's kernel can skip a step on the device ('fused' on CUDA), nothing waits for it.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

from flatout.errors import NumericsError, UsageError
from flatout.torch_private.attributes import TAKES_SCALE_IN_STEP


class GradientStep:
    """One optimizer's steps: scaled (fp16), clipped, skipped where a gradient is not finite."""

    def __init__(
        self, parameters: list[Any], optimizer: Any, *, clip_norm: float | None, fp16: bool, nonfinite: str | None
    ) -> None:
        import torch

        self.parameters, self.optimizer, self.clip_norm = parameters, optimizer, clip_norm
        self.nonfinite = nonfinite
        device = parameters[0].device
        self.scaler = torch.amp.GradScaler(device.type) if fp16 else None
        self._skipped = torch.zeros((), device=device, dtype=torch.int64)
        self._flags: deque[tuple[int, Any]] = deque()
        self.norm: Any = None
        """The gradient's norm before clipping, a device tensor; None where nothing asked for it."""

    @property
    def skipped(self) -> int:
        """Steps that were skipped so far. Waits for the device."""
        return int(self._skipped)

    def set_skipped(self, steps: int) -> None:
        self._skipped.fill_(steps)

    def scale(self, loss: Any) -> Any:
        """The loss to call backward on."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def take(self, step: int) -> None:
        """Step the optimizer, unless a gradient is not finite."""
        import torch

        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if self.clip_norm is not None or self.nonfinite is not None:
            gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
            self.norm = torch.nn.utils.get_total_norm(gradients)
            if self.clip_norm is not None:
                torch.nn.utils.clip_grads_with_norm_(self.parameters, self.clip_norm, self.norm)
        if self.scaler is not None:
            self._step_scaled()
        elif self.nonfinite is not None:
            self._step_if_finite(step)
        else:
            self.optimizer.step()

    def _step_scaled(self) -> None:
        """torch's scaler skips the optimizer's step itself, and adapts its scale."""
        scaler: Any = self.scaler
        before = scaler._scale.clone()
        scaler.step(self.optimizer)
        scaler.update()
        overflowed = (scaler._scale < before).to(self._skipped.dtype)  # only an overflow shrinks it
        self._skipped += overflowed

    def _step_if_finite(self, step: int) -> None:
        bad = (~self.norm.isfinite()).float()
        self._skipped += bad.to(self._skipped.dtype)
        if self.nonfinite == "raise":
            self._remember(step, bad)
        on_device = self.norm.device.type != "cpu" and getattr(self.optimizer, TAKES_SCALE_IN_STEP, False)
        if on_device:
            self.optimizer.grad_scale, self.optimizer.found_inf = None, bad
            try:
                self.optimizer.step()
            finally:
                del self.optimizer.grad_scale, self.optimizer.found_inf
        elif not bad:  # on a CPU this waits for nothing
            self.optimizer.step()
        self.check(wait=False)

    def _remember(self, step: int, bad: Any) -> None:
        import torch

        if bad.device.type == "cpu":
            self._flags.append((step, (bad, None)))
            return
        host = torch.empty((), pin_memory=True)
        host.copy_(bad, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._flags.append((step, (host, event)))

    def check(self, *, wait: bool) -> None:
        """Raise for a remembered step that was not finite; without `wait` only for those that are known by now."""
        while self._flags:
            step, (flag, event) = self._flags[0]
            if event is not None and not wait and not event.query():
                return
            if event is not None:
                event.synchronize()
            self._flags.popleft()
            if flag:
                self._flags.clear()
                raise NumericsError(
                    f"the gradient of step {step} is not finite; the weights are as they were before that step",
                    limit="nonfinite = 'raise' ends the run there",
                    remedy="look at that step's batch and learning rate, or set nonfinite = 'skip'",
                )


def check_clip_norm(value: float | None) -> None:
    if value is not None and not (isinstance(value, (int, float)) and 0 < value < math.inf):
        raise UsageError(f"clip_norm is {value!r}", limit="it is a finite number above 0, or None")
