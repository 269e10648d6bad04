"""Images as NHWC: convolutions of oneDNN and of tensor cores then need no reordering.

A convolution with an NHWC input has an NHWC output, and the operations between two convolutions keep the layout: only
the input of the first one has to be converted. Weights, gradients and optimizer state keep the script's layout, so
views, flattening and saving work as before. The model's outputs have the layout that they would have without the lever.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from flatout.levers.lever import Lever, Saving, Value, Verdict, offer, refuse
from flatout.levers.observed import Observed
from flatout.levers.subject import Subject, Wrapper
from flatout.machine.description import Machine
from flatout.precision.outputs import outputs_changed
from flatout.replaced import replaced

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

Gradients = Callable[..., "tuple[Tensor | None, ...]"]
"""torch.autograd.grad"""


class ChannelsLast(Lever):
    """Lay out images as NHWC, which the convolutions of oneDNN and Tensor Cores prefer.

    Inputs of convolutions are converted inside the calls that train. Weights, gradients, optimizer state and the
    model's outputs keep the script's layout, so flattening and saving work as before.
    """

    name = "channels_last"
    plan_field = "memory_format"
    acts_on_forward = True

    def saving(self, machine: Machine, observed: Observed) -> Saving:
        return Saving(expected=0.15 * observed.busy_share, least=-0.5, most=0.5 * observed.busy_share)

    def applies(self, machine: Machine, observed: Observed) -> Verdict:
        if not any(module.convolutions for module in observed.modules):
            return refuse("the model has no 2-d convolutions")
        if any(module.channels_last for module in observed.modules):
            return refuse("it is already used")
        return offer("channels_last", reason="the model has 2-d convolutions")

    @contextlib.contextmanager
    def apply(self, subject: Subject, value: Value) -> Iterator[None]:
        import torch

        with replaced(torch.autograd, "grad", _gradients_as_before), subject.around_calls(_call_around()):
            yield

    def label(self, value: Value) -> str:
        return self.name


def _call_around() -> Wrapper:
    """torch's own functions are restored after each call: `torch.jit.script` accepts no others."""
    from torch.nn import functional

    plain = functional.conv2d, functional.conv_transpose2d
    ours = tuple(_laying_out(original) for original in plain)

    def wrapper(module: Module, call: Callable[[], object]) -> object:
        if (functional.conv2d, functional.conv_transpose2d) != plain:  # replaced by another thread, or by the script
            return call()
        # By hand, and not with `replaced`: that would make two wrappers for each call, one around the other.
        functional.conv2d, functional.conv_transpose2d = ours
        try:
            result = call()
        finally:
            functional.conv2d, functional.conv_transpose2d = plain
        return outputs_changed(result, _as_before)

    return wrapper


def _laying_out(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    import torch

    last = torch.channels_last

    @functools.wraps(original)
    def convolution(input: Tensor, *args: object, **kwargs: object) -> Tensor:
        laid_out = input.contiguous(memory_format=last) if input.dim() == 4 else input
        return original(laid_out, *args, **kwargs)

    return convolution


def _as_before(tensor: Tensor) -> Tensor:
    """NHWC tensors as NCHW; others unchanged."""
    import torch

    if tensor.dim() != 4 or tensor.layout != torch.strided or tensor.is_contiguous():
        return tensor
    return tensor.contiguous() if tensor.is_contiguous(memory_format=torch.channels_last) else tensor


def _gradients_as_before(original: Gradients) -> Gradients:
    """Gradients that the script asks for itself; torch gives those in `.grad` the layout of their parameter."""

    def grad(*args: object, **kwargs: object) -> tuple[Tensor | None, ...]:
        return tuple(one if one is None else _as_before(one) for one in original(*args, **kwargs))

    return grad
