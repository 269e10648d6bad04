"""Batch norms of a CPU's training step by Flatout's kernel, together with the addition and the ReLU that follow them.

torch passes over memory for the mean, for the variance, for the result, for the addition, for ReLU and for the gradient
of each. Between convolutions these passes take as long as the convolutions themselves.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from flatout.levers.idle import Acts, said_if_idle
from flatout.levers.lever import Lever, Saving, Value, Verdict, offer, refuse
from flatout.levers.observed import Observed
from flatout.levers.subject import Subject
from flatout.machine.description import Machine
from flatout.precision.outputs import outputs_changed
from flatout.replaced import replaced_in_torch
from flatout.torch_private.late import dispatch

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

LEAST_ELEMENTS = 1 << 19
"""Of one batch norm's input: for smaller ones a call takes longer than the passes that it saves
(benchmarks/kernels/batch_norm.py)."""


class FusedNorm(Lever):
    """Batch norms in training on the CPU, with the addition and the ReLU after them, in one kernel.

    Statistics are computed in one pass, and the normalised activations are written once, with the shortcut added and
    ReLU applied. Other operations find the activations as the batch norm would have returned them.
    """

    name = "fused batch norm"
    plan_field = "normalization"
    names_value = False
    acts_on_forward = True

    def saving(self, machine: Machine, observed: Observed) -> Saving:
        share = max(0.0, observed.busy_share - observed.product_share(machine))
        return Saving(expected=0.3 * share, least=-0.1, most=0.6 * observed.busy_share)

    def applies(self, machine: Machine, observed: Observed) -> Verdict:
        if observed.device != "cpu":
            return refuse("the model is not on the CPU")
        if not any(module.batch_norms for module in observed.modules):
            return refuse("the model has no batch norms")
        if observed.is_compiled:
            return refuse("torch.compile is already used, which fuses them too")
        if observed.differentiates_twice:
            return refuse(f"the kernel's gradients have none of their own: {observed.differentiates_twice}")
        why = _obstacle()
        return refuse(why) if why else offer("fused", reason="the model has batch norms, which the CPU computes")

    @contextlib.contextmanager
    def apply(self, subject: Subject, value: Value) -> Iterator[None]:
        from torch.nn import functional

        from flatout.errors import MachineError

        why = _obstacle()
        if why is not None:
            raise MachineError(f"normalization = {value!r} is not possible: {why}")
        # Between calls too: what is checkpointed is computed again in the backward pass, and has to be the same there.
        acts = Acts()
        nothing = f"it saw no batch norm of {LEAST_ELEMENTS:,} numbers or more, in training on the CPU"
        with (
            replaced_in_torch((functional, "batch_norm", functools.partial(_fusing, acts))),
            subject.around_calls(_formed),
            said_if_idle(subject, self.name, acts, nothing),
        ):
            yield


def _obstacle() -> str | None:
    from flatout.kernels.native import native

    found = native("batch_norm")
    return f"the kernel is not available: {found.reason}" if found.library is None else None


def _formed(module: Module, call: Callable[[], object]) -> object:
    """Outputs of a model are torch's own tensors."""
    return outputs_changed(call(), _as_tensor)


def _as_tensor(output: Tensor) -> Tensor:
    from flatout.levers.lazy_norm import LazyNorm, form

    return form(output) if isinstance(output, LazyNorm) else output


def _fusing(acts: Acts, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    import torch

    from flatout.kernels.batch_norm import MEAN, VARIANCE, readable, statistics
    from flatout.levers.lazy_norm import LazyNorm, form, lazy_norm
    from flatout.levers.lazy_scores import is_plain
    from flatout.memory.fake_run import is_fake

    def batch_norm(
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if isinstance(input, LazyNorm):
            input = form(input)
        each = [one for one in (running_mean, running_var, weight, bias) if one is not None]
        if (
            torch.compiler.is_compiling()
            or not training
            or not torch.is_grad_enabled()
            or not is_plain(input)
            or is_fake(input)
            or input.is_inference()
            or (running_mean is None) != (running_var is None)  # torch refuses it
            or input.numel() < LEAST_ELEMENTS
            or input.numel() == input.shape[1]  # torch refuses a single number of each channel
            or not readable(input)
            or not all(is_plain(one) and one.dtype == torch.float32 and one.shape == input.shape[1:2] for one in each)
            or not (input.requires_grad or any(one.requires_grad for one in each))
            or dispatch().beside_autograd()
        ):
            return original(input, running_mean, running_var, weight, bias, training, momentum, eps)
        acts.any = True
        found = statistics(input, weight, bias, eps)
        with torch.no_grad():
            count = input.numel() // input.shape[1]
            # By `.data`, as torch does: an evaluation earlier in the same graph still finds them unchanged.
            if running_mean is not None:
                running_mean.data.mul_(1 - momentum).add_(found[MEAN], alpha=momentum)
            if running_var is not None:
                running_var.data.mul_(1 - momentum).add_(found[VARIANCE], alpha=momentum * count / (count - 1))
        return lazy_norm(input, weight, bias, found)

    return batch_norm
