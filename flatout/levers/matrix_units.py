"""Linear layers on a CPU's matrix units: Flatout's own products in bf16, where the processor has Intel's AMX.

They take the weights in fp32 as they are, where autocast makes a bf16 copy of each in every step, and write gradients
of weights in fp32. Without autocast, activations stay in fp32, and the products' inputs alone are rounded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from flatout.levers.lever import Lever, Saving, Value, Verdict, offer, refuse
from flatout.levers.observed import Observed
from flatout.levers.subject import Subject
from flatout.machine.description import Machine
from flatout.replaced import replaced

if TYPE_CHECKING:
    from torch import Tensor

LEAST_PRODUCTS = 1 << 24
"""Of one call: below, the call itself takes longer than its products."""


class Linear(Protocol):
    """torch.nn.functional.linear"""

    def __call__(self, input: Tensor, weight: Tensor, bias: Tensor | None = None, /) -> Tensor: ...


class MatrixUnits(Lever):
    """Linear layers by Flatout's own kernel for a processor's matrix units (AMX).

    Products are of numbers rounded to bf16, with sums in fp32, with or without autocast. Weights are read as they are,
    and gradients of weights written in fp32: no copies in bf16 are made of them.
    """

    name = "linear layers on matrix units"
    plan_field = "linear"
    acts_on_forward = True
    recompiles = True

    def saving(self, machine: Machine, observed: Observed) -> Saving:
        saved = observed.saved_by_dtype(machine, "bf16")
        return Saving(expected=0.8 * saved, least=-0.1, most=max(saved, 0.95 * observed.busy_share))

    def applies(self, machine: Machine, observed: Observed) -> Verdict:
        if observed.device != "cpu":
            return refuse("the model is not on the CPU")
        if "amx_bf16" not in machine.cpu.features:
            return refuse("this CPU has no matrix units for bf16 (AMX)")
        if not any(module.linears for module in observed.modules):
            return refuse("the model has no linear layers")
        if observed.differentiates_twice:
            return refuse(f"the kernel's gradients have none of their own: {observed.differentiates_twice}")
        from flatout.kernels.matrix_units import obstacle

        why = obstacle()
        return refuse(why) if why else offer("amx", reason="this CPU has matrix units for bf16 (AMX)")

    @contextlib.contextmanager
    def apply(self, subject: Subject, value: Value) -> Iterator[None]:
        from torch.nn import functional

        from flatout.errors import MachineError
        from flatout.kernels.matrix_units import obstacle

        why = obstacle()
        if why is not None:
            raise MachineError(f"linear = {value!r} is not possible: {why}")
        with replaced(functional, "linear", _linear):
            yield

    def label(self, value: Value) -> str:
        return self.name


def _linear(original: Linear) -> Linear:
    import torch

    from flatout.kernels.linear import linear as on_matrix_units
    from flatout.kernels.matrix_units import ELEMENTS, readable

    plain = (torch.Tensor, torch.nn.Parameter)

    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if (
            type(input) is not torch.Tensor
            or type(weight) not in plain
            or not readable(weight)
            or input.device.type != "cpu"
            or input.dtype not in ELEMENTS
            or input.ndim < 1
            or input.shape[-1] != weight.shape[1]
            or input.numel() * weight.shape[0] < LEAST_PRODUCTS
            or (bias is not None and bias.shape != weight.shape[:1])
        ):
            return original(input, weight, bias)
        if torch.is_autocast_enabled("cpu"):
            if torch.get_autocast_dtype("cpu") != torch.bfloat16:
                return original(input, weight, bias)
            input = input.to(torch.bfloat16)
        elif weight.dtype != input.dtype:
            return original(input, weight, bias)
        return on_matrix_units(input, weight, bias)

    return linear
