"""Layers of a script that are tried alone once the window is over: with the sizes that they had, on values of ours.

Convolutions: would channels_last be faster? A rule cannot say it: on one processor the format halves the time, on the
next it costs some. The largest of a step are timed, forward and backward in both formats in turns, so that a busy
machine slows both down, and with one thread too: what counts has to hold for both.

LSTM layers in 16 bits on the CPU: are their gradients right? What a layer computes in the script cannot be compared
without a second pass in fp32, whereas the fault depends on nothing but sizes, dtype, processor and torch (see
`precision/recurrent.py`).
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from flatout.precision.recurrent import gradient_error
from flatout.script.behaviour_seen import ChannelsLastSeen, RecurrentSeen
from flatout.statistics import Comparison, compare_paired

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

MOST_LAYERS = 4
"""Different ones that are tried of a kind."""
PAIRS = 8
BUDGET_SECONDS = 4.0


class Convolution(NamedTuple):
    """What a convolution computes."""

    inputs: tuple[int, ...]
    weight: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...] | str
    dilation: tuple[int, ...]
    groups: int
    dtype: torch.dtype
    device: torch.device
    input_gradient: bool = True
    """Not of the first layer: what it takes is no result of weights, and that pass is the slowest of all there."""

    @property
    def products(self) -> float:
        """In proportion to its work."""
        return math.prod((*self.inputs, *self.weight[2:], self.weight[0])) / self.groups


class ConvolutionTimer:
    """`note` is a forward hook of convolutions; `timed` when the window is over."""

    def __init__(self) -> None:
        self._calls: Counter[Convolution] = Counter()

    def note(self, module: nn.Module, inputs: tuple[object, ...]) -> None:
        from torch import Tensor, is_grad_enabled, nn

        if not isinstance(module, nn.Conv2d) or not inputs or not isinstance(inputs[0], Tensor) or inputs[0].ndim != 4:
            return
        given, weight = inputs[0], module.weight
        if not weight.requires_grad or not is_grad_enabled():
            return  # without a backward pass it is another computation
        self._calls[
            Convolution(
                inputs=tuple(given.shape),
                weight=tuple(weight.shape),
                stride=tuple(module.stride),
                padding=module.padding if isinstance(module.padding, str) else tuple(module.padding),
                dilation=tuple(module.dilation),
                groups=module.groups,
                dtype=weight.dtype,
                device=weight.device,
                input_gradient=inputs[0].requires_grad,
            )
        ] += 1

    def timed(self, autocast: str) -> ChannelsLastSeen | None:
        """None: there were no convolutions, or no time for enough pairs."""
        import torch

        chosen = sorted(self._calls, key=lambda one: -one.products * self._calls[one])[:MOST_LAYERS]
        if not chosen:
            return None
        dtype = getattr(torch, autocast) if autocast else None
        formats = (torch.contiguous_format, torch.channels_last)
        tensors = [[_tensors(one, dtype, memory_format) for one in chosen] for memory_format in formats]
        found = _compared(chosen, tensors)
        if found is None:
            return None
        alone = found
        if chosen[0].device.type == "cpu" and torch.get_num_threads() > 1:
            with _one_thread():
                alone = _compared(chosen, tensors) or found
        ratio, low = (min(getattr(one.comparison, name) for one in (found, alone)) for name in ("ratio", "low"))
        return ChannelsLastSeen(
            layers=len(chosen),
            contiguous_seconds=found.contiguous_seconds,
            channels_last_seconds=found.contiguous_seconds / ratio,
            low_ratio=low,
        )


class _Compared(NamedTuple):
    comparison: Comparison
    contiguous_seconds: float


def _compared(chosen: list[Convolution], tensors: list[list[tuple[Tensor, Tensor]]]) -> _Compared | None:
    """tensors: in either format. None: there was no time for enough pairs."""
    seconds: list[list[float]] = [[], []]
    began = time.perf_counter()
    for pair in range(PAIRS + 1):
        if time.perf_counter() - began > BUDGET_SECONDS:
            return None
        for number, given in enumerate(tensors):
            took = _seconds(chosen, given)
            if pair:  # the first one warms up
                seconds[number].append(took)
    return _Compared(compare_paired(seconds[0], seconds[1]), sorted(seconds[0])[PAIRS // 2])


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Beside busy processes, threads wait for each other in every operation: the format with fewer of these waits is
    the faster one then, on an idle machine perhaps not."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _tensors(one: Convolution, dtype: torch.dtype | None, memory_format: torch.memory_format) -> tuple[Tensor, Tensor]:
    import torch

    made = [
        torch.full(shape, 0.1, dtype=dtype or one.dtype, device=one.device).to(memory_format=memory_format)
        for shape in (one.inputs, one.weight)
    ]
    return made[0].requires_grad_(one.input_gradient), made[1].requires_grad_()


def _seconds(chosen: list[Convolution], tensors: list[tuple[Tensor, Tensor]]) -> float:
    import torch

    began = time.perf_counter()
    with torch.enable_grad():
        for one, (given, weight) in zip(chosen, tensors, strict=True):
            out = torch.nn.functional.conv2d(given, weight, None, one.stride, one.padding, one.dilation, one.groups)
            wanted = [tensor for tensor in (given, weight) if tensor.requires_grad]
            torch.autograd.grad(out, wanted, torch.ones_like(out))
    if chosen[0].device.type == "cuda":
        torch.cuda.synchronize(chosen[0].device)
    return time.perf_counter() - began


class RecurrentLayers:
    """`note` is a forward pre-hook of LSTM layers; `tried` when the window is over."""

    def __init__(self) -> None:
        self._sizes: dict[tuple[int, int], None] = {}
        """(inputs, units)."""

    def note(self, module: nn.Module) -> None:
        import torch
        from torch import nn

        if not isinstance(module, nn.LSTM) or not module.training or not torch.is_grad_enabled():
            return
        weight = module.weight_hh_l0
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else weight.dtype
        if weight.device.type == "cpu" and dtype == torch.bfloat16 and len(self._sizes) < MOST_LAYERS:
            self._sizes[module.input_size, module.hidden_size] = None

    def tried(self) -> tuple[RecurrentSeen, ...]:
        import torch

        found = []
        for inputs, units in self._sizes:
            error = gradient_error(inputs, units, torch.bfloat16)
            if math.isfinite(error):  # otherwise torch has no such layer, and the script has failed
                found.append(RecurrentSeen(inputs=inputs, units=units, dtype="bfloat16", gradient_error=error))
        return tuple(found)
