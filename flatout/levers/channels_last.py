"""Images as NHWC: convolutions of oneDNN and of tensor cores then need no reordering.

A convolution whose input lies so gives an output that does, and what stands between two of them keeps it: so only the
input of the first has to be laid out anew. The weights stay as the script made them, and so do their gradients and the
optimizer's state: whoever holds a view of them, flattens them or saves them finds what he would find anyway. What the
model returns is laid out as it would be without the lever.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from flatout.levers.lever import Lever, Saving, Verdict, offer, refuse
from flatout.levers.observed import Observed
from flatout.levers.subject import Subject
from flatout.machine.description import Machine
from flatout.precision.outputs import outputs_changed
from flatout.replaced import replaced


class ChannelsLast(Lever):
    """Lay out images as NHWC, which the convolutions of oneDNN and Tensor Cores prefer.

    Inputs of convolutions are laid out inside the calls that train. Weights, gradients, optimizer state and what
    the model returns keep the script's layout, so flattening and saving work as before.
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
            return refuse("the script uses it already")
        return offer("channels_last", reason="the model has 2-d convolutions")

    @contextlib.contextmanager
    def apply(self, subject: Subject, value: Any) -> Iterator[None]:
        import torch

        with replaced(torch.autograd, "grad", _gradients_as_before), subject.around_calls(_call_around()):
            yield

    def label(self, value: Any) -> str:
        return self.name


def _call_around() -> Callable[[Any, Callable[[], Any]], Any]:
    """Torch's own functions are back in their place before anybody else looks: `torch.jit.script` takes no others."""
    from torch.nn import functional

    plain = functional.conv2d, functional.conv_transpose2d
    ours = tuple(_laying_out(original) for original in plain)

    def wrapper(module: Any, call: Callable[[], Any]) -> Any:
        if (functional.conv2d, functional.conv_transpose2d) != plain:  # another thread's call, or the script's own
            return call()
        # By hand, and not with `replaced`: that would make two wrappers for each call, one around the other.
        functional.conv2d, functional.conv_transpose2d = ours
        try:
            result = call()
        finally:
            functional.conv2d, functional.conv_transpose2d = plain
        return outputs_changed(result, _as_before)

    return wrapper


def _laying_out(original: Any) -> Any:
    import torch

    last = torch.channels_last

    @functools.wraps(original)
    def convolution(input: Any, *args: Any, **kwargs: Any) -> Any:
        laid_out = input.contiguous(memory_format=last) if input.dim() == 4 else input
        return original(laid_out, *args, **kwargs)

    return convolution


def _as_before(tensor: Any) -> Any:
    """As NCHW where it lies as NHWC."""
    import torch

    if tensor.dim() != 4 or tensor.layout != torch.strided or tensor.is_contiguous():
        return tensor
    return tensor.contiguous() if tensor.is_contiguous(memory_format=torch.channels_last) else tensor


def _gradients_as_before(original: Any) -> Any:
    """Gradients that the script asks for itself; those in `.grad` lie as their parameter does by torch's own rule."""

    def grad(*args: Any, **kwargs: Any) -> Any:
        return tuple(one if one is None else _as_before(one) for one in original(*args, **kwargs))

    return grad
