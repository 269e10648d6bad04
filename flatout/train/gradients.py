"""After backward: unscale, look for inf and NaN, clip, step. In this order, and without waiting for the device.

Clipping before unscaling would clip scaled gradients, and far too much. The check before clipping shares the norm with
it. Where the optimizer's kernel can skip a step on the device ('fused' on CUDA), the host does not wait.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flatout.errors import NumericsError, UsageError
from flatout.parallel.whole_tensors import total_norm
from flatout.parameters import parameters_of
from flatout.precision.fused_sgd import types_lost_by
from flatout.torch_private.attributes import TAKES_SCALE_IN_STEP
from flatout.train.readings import HostCopy

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.optim import Optimizer

    from flatout.train.split import Attempt


class GradientStep:
    """One optimizer's steps: scaled (fp16), clipped, skipped if a gradient is not finite.

    name_of: the name of a parameter in messages; '' where it is not known.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        clip_norm: float | None,
        fp16: bool,
        nonfinite: str | None,
        norm_of: Callable[[list[Tensor]], Tensor] | None,
        name_of: Callable[[Tensor], str],
    ) -> None:
        import torch

        self.optimizer, self.clip_norm = optimizer, clip_norm
        self.nonfinite, self._norm_of = nonfinite, norm_of
        self._name_of = name_of
        self.may_skip = fp16 or nonfinite is not None
        """Is a step skipped whose gradient is not finite?"""
        self._dense = 0
        """So many gradients of the last step are known to be dense: more come with a layer that is unfrozen."""
        device = self.parameters[0].device
        self.scaler = torch.amp.GradScaler(device.type) if fp16 else None
        self._skipped = torch.zeros((), device=device, dtype=torch.int64)
        self._flags: deque[tuple[int, HostCopy]] = deque()
        """(step, was its gradient not finite?)"""
        self._last_skipped: Tensor | None = None
        """Was the last step skipped? A scalar on the device; None where no step is ever skipped."""
        self.norm: Tensor | None = None
        """The gradient's norm before clipping, a device tensor; None if it was not needed."""

    @property
    def parameters(self) -> list[Tensor]:
        """Those that the optimizer has now: a layer may join later."""
        return parameters_of(self.optimizer)

    @property
    def skipped(self) -> int:
        """Steps that were skipped so far. Waits for the device."""
        return int(self._skipped)

    def set_skipped(self, steps: int) -> None:
        self._skipped.fill_(steps)

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to call backward on."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def take(self, step: int, before: Attempt | None = None) -> None:
        """Step the optimizer, unless a gradient is not finite: then the buffers are as `before` the step too."""
        self._last_skipped = None
        try:
            self._take(step)
        finally:
            if before is not None and self._last_skipped is not None:
                before.put_back_where(self._last_skipped)

    def _take(self, step: int) -> None:
        import torch

        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if self.clip_norm is not None or self.nonfinite is not None:
            parameters = self.parameters
            gradients = [one.grad for one in parameters if one.grad is not None]
            if len(gradients) != self._dense and any(one.is_sparse for one in gradients):
                raise self._sparse_error()
            self._dense = len(gradients)
            self.norm = total_norm(gradients) if self._norm_of is None else self._norm_of(parameters)
            if self.clip_norm is not None:
                torch.nn.utils.clip_grads_with_norm_(parameters, self.clip_norm, self.norm)
        if self.scaler is not None:
            self._step_scaled(self.scaler)
        elif self.nonfinite is not None and self.norm is not None:
            self._step_if_finite(step, self.norm)
        else:
            self.optimizer.step()

    def _sparse_error(self) -> UsageError:
        """Torch has no norm of several sparse gradients, and cannot scale one in place."""
        sparse = next(one for one in self.parameters if one.grad is not None and one.grad.is_sparse)
        asked = f"clip_norm is {self.clip_norm}" if self.clip_norm is not None else f"nonfinite is {self.nonfinite!r}"
        name = self._name_of(sparse) or f"a parameter of shape {list(sparse.shape)}"
        return UsageError(
            f"{asked}, and the gradient of {name} is sparse",
            limit="the norm of all gradients is computed of dense ones alone",
            remedy="make the embedding without sparse=True, or leave the option out",
        )

    def _step_scaled(self, scaler: torch.amp.GradScaler) -> None:
        """torch's scaler skips the optimizer's step itself, and adapts its scale."""
        assert scaler._scale is not None  # set by the first call of scale()
        before = scaler._scale.clone()
        scaler.step(self.optimizer)
        scaler.update()
        self._last_skipped = scaler._scale < before  # only an overflow shrinks it
        self._skipped += self._last_skipped.to(self._skipped.dtype)

    def _step_if_finite(self, step: int, norm: Tensor) -> None:
        self._last_skipped = ~norm.isfinite()
        bad = self._last_skipped.float()
        self._skipped += bad.to(self._skipped.dtype)
        if self.nonfinite == "raise":
            self._flags.append((step, HostCopy(bad)))
        optimizer: Any = self.optimizer  # a fused one of torch's, whose kernel does nothing where `found_inf` is 1
        if norm.device.type != "cpu" and getattr(optimizer, TAKES_SCALE_IN_STEP, False):
            optimizer.grad_scale, optimizer.found_inf = None, bad
            try:
                optimizer.step()
            finally:
                del optimizer.grad_scale, optimizer.found_inf
        elif not bad:  # on a CPU there is nothing to wait for
            optimizer.step()
        self.check(wait=False)

    def check(self, *, wait: bool) -> None:
        """Raise for a recorded step that was not finite; without `wait` only for those whose flags have arrived."""
        while self._flags:
            step, bad = self._flags[0]
            if not wait and not bad.arrived():
                return
            self._flags.popleft()
            if any(bad.values()):
                self._flags.clear()
                raise NumericsError(
                    f"the gradient of step {step} is not finite; the weights are as they were before that step",
                    limit="nonfinite = 'raise' ends the run there",
                    remedy="look at that step's batch and learning rate, or set nonfinite = 'skip'",
                )


def check_clip_norm(value: float | None) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is not None and not (number and 0 < value < math.inf):
        raise UsageError(f"clip_norm is {value!r}", limit="it is a finite number above 0, or None")


def check_scalable(optimizer: Optimizer, name_of: Callable[[Tensor], str]) -> None:
    """UsageError for a parameter whose gradient torch's loss scaling does not take."""
    import torch

    for one in parameters_of(optimizer):
        if one.dtype == torch.float16 or one.is_complex():
            raise UsageError(
                f"precision is 'fp16', and {name_of(one) or 'a parameter'} is {str(one.dtype).removeprefix('torch.')}",
                limit="it scales the loss, and torch cannot unscale gradients that are fp16 or complex",
                remedy="keep the weights in fp32, or use another precision",
            )


def check_trained(optimizer: Optimizer) -> None:
    """UsageError for an optimizer whose kernel does not store its updates of these weights."""
    for dtype in types_lost_by(optimizer):
        raise UsageError(
            f"the optimizer is an SGD with fused=True, and weights on the CPU are {str(dtype).removeprefix('torch.')}",
            limit="torch's fused SGD does not store updates of such weights (pytorch issue 191763)",
            remedy="leave fused=True out, or keep the weights in fp32",
        )
