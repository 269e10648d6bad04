"""Images as NHWC: convolutions of oneDNN and of tensor cores then need no reordering.

A convolution with an NHWC input has an NHWC output, and the operations between two convolutions keep the layout: only
the input of the first one has to be converted. Weights, gradients, optimizer state and the model's outputs keep the
script's layout.

Random numbers fill a tensor in the order of its memory. So dropout sees the script's layout, or other activations would
be dropped. A checkpointed part runs as torch has it, which computes it again outside of the model's call: from the same
input come the same layouts, and so the same random numbers. (Where the input is NHWC, they are not the script's.)
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from flatout.levers.lever import Lever, Saving, Value, Verdict, offer, refuse
from flatout.levers.observed import Observed
from flatout.levers.subject import Subject, Wrapper
from flatout.levers.training_call import is_checkpointing
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

    Inputs of convolutions are converted inside the calls that train, but not in checkpointed parts. Weights,
    gradients, optimizer state and the model's outputs keep the script's layout, so saving them and flattening outputs
    work as before. Inside the model an activation may need `reshape` or `flatten` in place of `view`.
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

    plain = functional.conv2d, functional.conv_transpose2d, functional.dropout
    ours = _laying_out(plain[0]), _laying_out(plain[1]), _dropping_as_before(plain[2])

    def wrapper(module: Module, call: Callable[[], object]) -> object:
        if (functional.conv2d, functional.conv_transpose2d, functional.dropout) != plain:
            return call()  # replaced by another thread, or by the script
        # By hand, and not with `replaced`: that would make wrappers for each call, one around the other.
        functional.conv2d, functional.conv_transpose2d, functional.dropout = ours
        try:
            result = call()
        finally:
            functional.conv2d, functional.conv_transpose2d, functional.dropout = plain
        return outputs_changed(result, _as_before)

    return wrapper


def _laying_out(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    import torch

    last = torch.channels_last

    @functools.wraps(original)
    def convolution(input: Tensor, *args: object, **kwargs: object) -> Tensor:
        if input.dim() != 4 or is_checkpointing():
            return original(input, *args, **kwargs)
        return original(input.contiguous(memory_format=last), *args, **kwargs)

    return convolution


def _dropping_as_before(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    import torch

    @functools.wraps(original)
    def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        # A reentrant checkpoint runs without gradients, and is computed again by torch's own functions.
        draws = training and p > 0 and torch.is_grad_enabled() and not is_checkpointing()
        before = _as_before(input) if draws else input
        if before is input:
            return original(input, p, training, inplace)
        dropped = original(before, p, training)
        return input.copy_(dropped) if inplace else dropped.contiguous(memory_format=torch.channels_last)

    return dropout


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
