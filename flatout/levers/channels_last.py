"""Images as NHWC: convolutions of oneDNN and of tensor cores then need no reordering.

A convolution with an NHWC input has an NHWC output, and the operations between two convolutions keep the layout: only
the input of the first one has to be converted. Weights, gradients, optimizer state and the model's outputs keep the
script's layout.

Random numbers fill a tensor in the order of its memory. So what draws them for an activation (dropout, `randn_like`,
`normal_`) sees the script's layout, or other activations would be dropped. A checkpointed part runs as torch has it,
which computes it again outside of the model's call: from the same input come the same layouts, and so the same random
numbers. (Where the input is NHWC, they are not the script's.)
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from flatout.levers.idle import Acts, said_if_idle
from flatout.levers.lever import Lever, Saving, Value, Verdict, offer, refuse
from flatout.levers.observed import Observed
from flatout.levers.subject import Subject, Wrapper, is_checkpointing
from flatout.machine.description import Machine
from flatout.precision.outputs import outputs_changed
from flatout.replaced import Replacement, replaced, replaced_in_torch

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

Gradients = Callable[..., "tuple[Tensor | None, ...]"]
"""torch.autograd.grad"""

LIKE = ("rand_like", "randn_like", "randint_like", "dropout", "alpha_dropout")
"""Functions of torch that draw numbers in the order of their first argument's memory."""
INTO = (
    *("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_"),
    *("dropout_", "alpha_dropout_"),
)
"""Methods of tensors, or functions of torch, that draw numbers into their first argument."""


class ChannelsLast(Lever):
    """Lay out images as NHWC, which the convolutions of oneDNN and Tensor Cores prefer.

    Inputs of convolutions are converted inside the calls that train, but not in checkpointed parts. Weights,
    gradients, optimizer state and the model's outputs keep the script's layout, so saving them and flattening outputs
    work as before. Inside the model an activation may need `reshape` or `flatten` in place of `view`.
    """

    name = "channels_last"
    plan_field = "memory_format"
    names_value = False
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
        from torch.utils.checkpoint import CheckpointFunction

        calls, nothing = _Calls(), "it saw no 2-d convolution"
        with (
            replaced(torch.autograd, "grad", _gradients_as_before),
            replaced(CheckpointFunction, "forward", calls.in_reentrant_checkpoint),
            replaced_in_torch(*calls.drawing()),
            subject.around_calls(calls.around()),
            said_if_idle(subject, self.name, calls.acts, nothing),
        ):
            yield


class _Calls:
    """The model's calls, and what is replaced for them."""

    def __init__(self) -> None:
        self.acts = Acts()
        self._under_way = False
        """Is one, and outside of reentrant checkpoints?"""

    def around(self) -> Wrapper:
        """torch's own functions are restored after each call: `torch.jit.script` accepts no others."""
        from torch.nn import functional

        plain = functional.conv2d, functional.conv_transpose2d, functional.dropout
        ours = self._laying_out(plain[0]), self._laying_out(plain[1]), self._dropping(plain[2], by_default=True)

        def wrapper(module: Module, call: Callable[[], object]) -> object:
            if (functional.conv2d, functional.conv_transpose2d, functional.dropout) != plain:
                return call()  # replaced by another thread, or by the script
            # By hand, and not with `replaced`: that would make wrappers for each call, one around the other.
            functional.conv2d, functional.conv_transpose2d, functional.dropout = ours
            self._under_way = True
            try:
                result = call()
            finally:
                self._under_way = False
                functional.conv2d, functional.conv_transpose2d, functional.dropout = plain
            return outputs_changed(result, _as_before)

        return wrapper

    def drawing(self) -> Iterator[Replacement]:
        """Of what draws random numbers. These stay in place between calls, where they do nothing."""
        import torch
        from torch.nn import functional

        yield functional, "alpha_dropout", self._dropping
        yield from ((torch, name, self._drawing) for name in LIKE)
        for name in INTO:
            yield torch.Tensor if hasattr(torch.Tensor, name) else torch, name, self._drawing_into

    def in_reentrant_checkpoint(self, forward: Callable[..., object]) -> Callable[..., object]:
        """Its forward pass, which is computed again by torch's own functions, runs by these too."""

        def plain(*args: object) -> object:
            before, self._under_way = self._under_way, False
            try:
                return forward(*args)
            finally:
                self._under_way = before

        return plain

    def _lays_out(self) -> bool:
        return self._under_way and not is_checkpointing()

    def _laying_out(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        import torch

        last = torch.channels_last

        @functools.wraps(original)
        def convolution(input: Tensor, *args: object, **kwargs: object) -> Tensor:
            if input.dim() == 4 and not self.acts.any:
                self.acts.note()
            if input.dim() != 4 or not self._lays_out():
                return original(input, *args, **kwargs)
            return original(input.contiguous(memory_format=last), *args, **kwargs)

        return convolution

    def _dropping(self, original: Callable[..., Tensor], *, by_default: bool = False) -> Callable[..., Tensor]:
        """by_default: does it drop where `training` is not given?"""
        import torch

        @functools.wraps(original)
        def dropout(input: Tensor, p: float = 0.5, training: bool = by_default, inplace: bool = False) -> Tensor:
            before = _as_before(input) if training and p > 0 and self._lays_out() else input
            if before is input:
                return original(input, p, training, inplace)
            dropped = original(before, p, training)
            return input.copy_(dropped) if inplace else dropped.contiguous(memory_format=torch.channels_last)

        return dropout

    def _drawing(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def draw(input: Tensor, *args: object, **kwargs: object) -> Tensor:
            return original(_as_before(input) if self._lays_out() else input, *args, **kwargs)

        return draw

    def _drawing_into(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def draw(input: Tensor, *args: object, **kwargs: object) -> Tensor:
            before = _as_before(input) if self._lays_out() else input
            drawn = original(before, *args, **kwargs)
            return drawn if before is input else input.copy_(drawn)

        return draw


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
