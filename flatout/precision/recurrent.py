"""LSTM layers under 16-bit autocast on a CPU, where oneDNN's gradients are not always right.

With hidden sizes of 1,024 and 2,048 on a processor with AMX, torch 2.13 computes a gradient of the input that is off by
its whole size, and gradients of the weights that are off by up to a half; other sizes are as good as bf16 is. In fp16,
training an LSTM fails. So each layer's gradients are tried once, and where they are wrong it runs in fp32.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

from flatout.replaced import replaced_in_torch
from flatout.torch_private.compiler import run_when_traced

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

MOST_ERROR = 0.1
"""Relative; bf16 itself makes 0.005 to 0.01."""
PERIOD, MIXED = 1009, 389
"""Of the values that gradients are tried with: a prime, so that rows differ; and what puts them out of order."""


@contextmanager
def lstm_gradients_right() -> Iterator[None]:
    """Layers that train under autocast on a CPU run in fp32 where their gradients would be wrong."""
    from torch import nn

    with replaced_in_torch((nn.LSTM, "forward", _right_forward)):
        yield


def _right_forward(original: Callable[..., object]) -> Callable[..., object]:
    import torch

    def forward(layer: nn.LSTM, input: object, hx: object = None) -> object:  # torch's names, which scripts may use
        weight = layer.weight_hh_l0
        if (
            weight.device.type != "cpu"
            or not torch.is_grad_enabled()
            or not torch.is_autocast_enabled("cpu")
            or _gradients_are_right(layer.input_size, layer.hidden_size, torch.get_autocast_dtype("cpu"))
        ):
            return original(layer, input, hx)
        with torch.autocast("cpu", enabled=False):
            return original(layer, _as(input, weight.dtype), _as(hx, weight.dtype))

    return forward


@run_when_traced  # tracing the cached function warns since torch 2.15, and its result is a constant
def _gradients_are_right(input_size: int, hidden_size: int, dtype: torch.dtype) -> bool:
    return gradient_error(input_size, hidden_size, dtype) <= MOST_ERROR


def _as(value: object, dtype: torch.dtype) -> object:
    """A tensor, a PackedSequence or a pair of states as that type; anything else as it is, for the layer to refuse."""
    if isinstance(value, (tuple, list)) and not hasattr(value, "batch_sizes"):
        return tuple(_as(one, dtype) for one in value)
    return value.to(dtype) if hasattr(value, "to") else value


@functools.cache
def gradient_error(input_size: int, hidden_size: int, dtype: torch.dtype) -> float:
    """Relative error of the input's gradient through a layer of this size under autocast on a CPU, measured once; it
    draws no random numbers. Infinite where it cannot be computed.

    In a thread of its own, as modes and hooks of autograd and of the compiler belong to threads: checkpointing counts
    what a forward pass saves, and a compiled layer has other gradients.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_measured_error, input_size, hidden_size, dtype).result()


def _measured_error(input_size: int, hidden_size: int, dtype: torch.dtype) -> float:
    import torch

    scale, rows = hidden_size**-0.5, 4 * hidden_size
    weights = [_values(rows, input_size, scale=scale), _values(rows, hidden_size, scale=scale)]
    weights += [torch.zeros(rows) for _ in range(2)]
    exact = _input_gradient(weights)
    try:
        with torch.autocast("cpu", dtype=dtype):
            found = _input_gradient(weights)
    except RuntimeError:  # oneDNN has no such layer
        return math.inf
    return float((found - exact).norm() / exact.norm())


def _input_gradient(weights: Sequence[Tensor]) -> Tensor:
    """Through one step of two samples, in training."""
    import torch

    hidden_size, input_size = weights[1].shape[1], weights[0].shape[1]
    x = _values(1, 2, input_size, scale=1.0).requires_grad_()
    states = tuple(torch.zeros(1, 2, hidden_size) for _ in range(2))
    flat = [one.requires_grad_() for one in weights]
    output = torch.lstm(x, states, flat, True, 1, 0.0, True, False, True)[0]
    weighed = (output.float() * _values(1, 2, hidden_size, scale=1.0)).sum()
    (gradient,) = torch.autograd.grad(weighed, [x])
    return gradient


def _values(*shape: int, scale: float) -> Tensor:
    """From -scale to scale."""
    import torch

    count = math.prod(shape)
    pattern = (torch.arange(PERIOD) * MIXED % PERIOD) * (2 * scale / PERIOD) - scale
    return pattern.repeat(count // PERIOD + 1)[:count].view(shape)
