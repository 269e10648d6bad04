"""Images as NHWC: convolutions of oneDNN and of tensor cores then need no reordering.

Converting the weights is enough: a convolution returns the layout of its weights, and the next one keeps it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from flatout.levers.lever import Lever, Verdict, offer, refuse
from flatout.levers.observed import Observed
from flatout.levers.subject import Subject, Undo
from flatout.machine.description import Machine


class ChannelsLast(Lever):
    """Weights, their gradients and the optimizer's moments change layout together: fused kernels walk them in step."""

    name = "channels_last"
    plan_field = "memory_format"
    exactness = "rounding"
    acts_on_forward = True

    def applies(self, machine: Machine, observed: Observed) -> Verdict:
        if not any(module.convolutions for module in observed.modules):
            return refuse("the model has no 2-d convolutions")
        if any(module.channels_last for module in observed.modules):
            return refuse("the script uses it already")
        return offer("channels_last", reason="the model has 2-d convolutions")

    @contextlib.contextmanager
    def apply(self, subject: Subject, value: Any) -> Iterator[None]:
        import torch

        last, first = torch.channels_last, torch.contiguous_format

        def lay_out(module: Any, memory_format: Any) -> None:
            _lay_out_module(module, memory_format)
            for optimizer in subject.optimizers:
                _lay_out_state(optimizer)

        def visit_module(module: Any) -> Undo[Any]:
            lay_out(module, last)
            return lambda module: lay_out(module, first)

        def visit_optimizer(optimizer: Any) -> Undo[Any]:
            _lay_out_state(optimizer)
            return _lay_out_state

        with subject.modules.each(visit_module), subject.optimizers.each(visit_optimizer):
            yield

    def label(self, value: Any) -> str:
        return self.name


def _lay_out_module(module: Any, memory_format: Any) -> None:
    for tensor in [*module.parameters(), *module.buffers()]:
        if tensor.dim() == 4:
            tensor.data = tensor.data.contiguous(memory_format=memory_format)
            if tensor.grad is not None:
                tensor.grad = tensor.grad.contiguous(memory_format=memory_format)


def _lay_out_state(optimizer: Any) -> None:
    """Moments as their parameter lies, which a model that is not watched may have kept as it was."""
    import torch

    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() == 4 and value.shape == parameter.shape:
                state[name] = as_laid_out(value, parameter)


def as_laid_out(tensor: Any, model: Any) -> Any:
    """`tensor` with the strides of `model`; itself where it has them already."""
    import torch

    if tensor.stride() == model.stride():
        return tensor
    return torch.empty_strided(model.shape, model.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)
