"""What one step of a script computes: its operations, and the values in them. Importing this imports torch.

finish = follow_step()
...                                        # one step, which takes several times as long
finish().flops_per_step
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from flatout.flops import OperationCount
from flatout.levers.bf16_kernels import LEAST_IN_ATTENTION, LEAST_IN_LINEAR
from flatout.levers.chunked_loss import LEAST_CLASSES
from flatout.levers.observed import StepWork
from flatout.operator_bytes import tensors_among
from flatout.torch_private.attributes import packet_of
from flatout.torch_private.dispatch import ListeningMode, without_torch_function
from flatout.torch_private.tensors import is_zero_tensor

if TYPE_CHECKING:
    from torch._ops import OpOverload

MOST_VALUES = 1 << 16
"""Values of a tensor that are checked: where denormal numbers slow a step down, there are many."""
TURNS = 20
TINY = torch.finfo(torch.float32).tiny
MOST_PADDING = 128
"""Outputs of a last layer beyond a vocabulary, which is rounded up: their scores are cut off before the loss."""
_TAKEN_OVER = {
    "mm": 2 * LEAST_IN_LINEAR,
    "addmm": 2 * LEAST_IN_LINEAR,
    "_scaled_dot_product_flash_attention_for_cpu": 4 * LEAST_IN_ATTENTION,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 10 * LEAST_IN_ATTENTION,
}
"""Operations that the bf16 kernels may take over, from so many FLOPs on."""
_LOSSES = (torch.ops.aten.nll_loss_forward, torch.ops.aten.nll_loss2d_forward)
_LEAST_FLOPS = {getattr(torch.ops.aten, name, None): flops for name, flops in _TAKEN_OVER.items()}


def follow_step(
    *, counts_flops: bool = True, at_denormals: Callable[[int], None] = lambda count: None
) -> Callable[[], StepWork]:
    """Start following; call the result at the end of the step. counts_flops: False where another step counts them.
    at_denormals: called with their number after an operation that takes or gives any."""
    entered = contextlib.ExitStack()
    mode = entered.enter_context(_WorkMode(counts_flops=counts_flops, at_denormals=at_denormals))

    def finish() -> StepWork:
        entered.close()
        return StepWork(
            flops_per_step=mode.flops or None,
            operations_per_step=mode.operations,
            denormal_share=mode.denormal / mode.looked_at if mode.looked_at else None,
            denormal_slowdown=_denormal_slowdown() if mode.denormal else None,
            large_share=mode.large_flops / mode.flops if mode.flops else None,
            ignored_share=mode.ignored_flops / mode.flops if mode.flops else None,
        )

    return finish


class _WorkMode(ListeningMode):
    def __init__(self, *, counts_flops: bool, at_denormals: Callable[[int], None]) -> None:
        super().__init__()
        self._at_denormals = at_denormals
        self.operations = self.looked_at = self.denormal = 0
        self.flops = self.large_flops = 0.0
        self._formulas = OperationCount() if counts_flops else None
        self._wide_flops: defaultdict[int, float] = defaultdict(float)
        """Of products with a dimension of this many classes."""
        self._targets: Counter[int] = Counter()
        self._ignored: Counter[int] = Counter()
        """Targets of losses over this many classes, and those that do not count."""

    @property
    def ignored_flops(self) -> float:
        """Of products for scores that no target needs: the share of a loss's targets that it ignores."""
        return sum(
            flops * count / self._targets[classes]
            for classes, count in self._ignored.items()
            for width, flops in self._wide_flops.items()
            if classes <= width <= classes + MOST_PADDING
        )

    def listen(self, func: OpOverload[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        out = func(*args, **kwargs)
        self.operations += 1
        before = self.denormal
        with without_torch_function():  # the script's own modes must not see our operations
            if self._formulas is not None:
                self._count(self._formulas.of(func, args, kwargs, out) or 0.0, func, args)
                if packet_of(func) in _LOSSES:
                    self._count_targets(*args)
            for tensor in tensors_among(args):
                self._look_at(tensor)
            for tensor in tensors_among(out):
                self._look_at(tensor)
        if self.denormal > before:
            self._at_denormals(self.denormal - before)
        return out

    def _count(self, flops: float, func: OpOverload[..., object], args: tuple[object, ...]) -> None:
        self.flops += flops
        if flops:
            for size in {size for tensor in tensors_among(args) for size in tensor.shape if size >= LEAST_CLASSES}:
                self._wide_flops[size] += flops
        if flops >= _LEAST_FLOPS.get(packet_of(func), math.inf):
            self.large_flops += flops

    def _count_targets(
        self, scores: object, targets: object, weight: object = None, reduction: object = None, ignored: object = None
    ) -> None:
        """Arguments of torch's nll_loss; ignored: the target that does not count."""
        if not isinstance(scores, torch.Tensor) or type(targets) is not torch.Tensor:
            return
        if isinstance(ignored, int) and targets.device.type == "cpu" and targets.numel():
            classes = scores.shape[min(1, scores.ndim - 1)]
            self._targets[classes] += targets.numel()
            self._ignored[classes] += int(targets.eq(ignored).sum())

    def _look_at(self, tensor: torch.Tensor) -> None:
        """Count denormals among fp32 values on the CPU, where they may be slow."""
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.dtype != torch.float32:
            return
        if tensor.device.type != "cpu" or tensor.layout != torch.strided or not tensor.numel():
            return
        if is_zero_tensor(tensor) or not tensor.untyped_storage().nbytes():
            return  # no memory to read: FSDP2 frees weights that it has gathered
        values = _sampled(tensor.detach())
        self.looked_at += values.numel()
        self.denormal += int(((values != 0) & (values.abs() < TINY)).sum())


def _denormal_slowdown() -> float:
    """Slowdown of an addition of fp32 values, by the quickest of a few repetitions."""

    def seconds(value: float) -> float:
        # Not the script's default dtype and device: 1e-40 is no denormal in fp64.
        values = torch.full((MOST_VALUES // 4,), value, dtype=torch.float32, device="cpu")
        return min(_seconds(lambda: values + values) for _ in range(TURNS))

    return max(1.0, seconds(1e-40) / seconds(1.0))


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _sampled(tensor: torch.Tensor) -> torch.Tensor:
    """Values spread over the tensor, without copying all of it."""
    if not tensor.is_contiguous():
        tensor = tensor[tuple(slice(None, None, max(1, size // 16)) for size in tensor.shape)]
    flat = tensor.reshape(-1)
    return flat[:: max(1, flat.numel() // MOST_VALUES)]
