"""Flatout's own kernels for a CPU's matrix units (Intel AMX): linear layers, attention and GELU of a training step.

Weights are read in fp32 as they are, where autocast makes a bf16 copy of each in every step, and gradients of weights
are written in fp32. Without autocast the layers' inputs and outputs stay in fp32, and only products are in bf16.
Attention and GELU are computed in bf16 where autocast would do so, or where their inputs are.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from flatout.levers.lever import Lever, Saving, Value, Verdict, offer, refuse
from flatout.levers.observed import Observed
from flatout.levers.subject import Subject
from flatout.machine.description import Machine
from flatout.replaced import replaced

if TYPE_CHECKING:
    import torch
    from torch import Tensor

LEAST_PRODUCTS = 1 << 24
"""Multiplications of one call: below, the call itself takes longer than its products."""
LEAST_ELEMENTS = 1 << 15
"""Of one GELU."""


class MatrixUnits(Lever):
    """Linear layers, attention and GELU by Flatout's own kernels for a processor's matrix units (AMX).

    Products are of numbers rounded to bf16, with sums in fp32. With autocast, weights are read as they are and their
    gradients are written in fp32, without copies in bf16; without it, activations stay in fp32.
    """

    name = "kernels for matrix units"
    plan_field = "kernels"
    acts_on_forward = True

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
            return refuse(f"the kernels' gradients have none of their own: {observed.differentiates_twice}")
        from flatout.kernels.matrix_units import obstacle

        why = obstacle()
        return refuse(why) if why else offer("amx", reason="this CPU has matrix units for bf16 (AMX)")

    @contextlib.contextmanager
    def apply(self, subject: Subject, value: Value) -> Iterator[None]:
        import torch
        from torch.nn import functional

        from flatout.errors import MachineError
        from flatout.kernels.matrix_units import obstacle

        why = obstacle()
        if why is not None:
            raise MachineError(f"kernels = {value!r} is not possible: {why}")
        with contextlib.ExitStack() as stack:
            stack.enter_context(replaced(functional, "linear", _linear))
            stack.enter_context(replaced(torch, "addmm", _addmm))
            stack.enter_context(replaced(functional, "scaled_dot_product_attention", _attention))
            stack.enter_context(replaced(functional, "gelu", _gelu))
            transformers = sys.modules.get("transformers.activations")
            if transformers is not None:
                stack.enter_context(replaced(transformers.NewGELUActivation, "forward", _written_out_gelu))
            yield

    def label(self, value: Value) -> str:
        return self.name


class Linear(Protocol):
    """torch.nn.functional.linear"""

    def __call__(self, input: Tensor, weight: Tensor, bias: Tensor | None = None, /) -> Tensor: ...


def _linear(original: Linear) -> Linear:
    from flatout.kernels.training_operators import linear as on_matrix_units

    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        fitting = _fitting(input, weight, bias)
        return original(input, weight, bias) if fitting is None else on_matrix_units(fitting, weight, bias)

    return linear


class Addmm(Protocol):
    """torch.addmm"""

    def __call__(self, input: Tensor, mat1: Tensor, mat2: Tensor, **options: object) -> Tensor: ...


def _addmm(original: Addmm) -> Addmm:
    """A linear layer whose weights are [inputs, outputs], as transformers writes GPT-2's."""
    from flatout.kernels.training_operators import linear as on_matrix_units

    def addmm(input: Tensor, mat1: Tensor, mat2: Tensor, **options: object) -> Tensor:
        if not options and _is_plain(mat2) and mat2.ndim == 2 and mat1.ndim == 2:
            fitting = _fitting(mat1, mat2, input, transposed=True)
            if fitting is not None:
                return on_matrix_units(fitting, mat2.t(), input)
        return original(input, mat1, mat2, **options)

    return addmm


def _fitting(x: Tensor, weight: Tensor, bias: Tensor | None, *, transposed: bool = False) -> Tensor | None:
    """A layer's input in the dtype that its products are to have; None where torch's own layer is to be called.

    Called for each linear layer: the cheapest checks come first.
    """
    from flatout.kernels.matrix_units import ELEMENTS, readable

    if not (_is_plain(x) and _is_plain(weight)) or x.device.type != "cpu" or x.ndim < 1 or not readable(weight):
        return None
    inputs, outputs = weight.shape if transposed else weight.shape[::-1]
    if x.shape[-1] != inputs or x.numel() * outputs < LEAST_PRODUCTS or x.dtype not in ELEMENTS:
        return None
    if bias is not None and (bias.shape != (outputs,) or bias.dtype not in ELEMENTS):
        return None
    return _as_autocast(x, weight.dtype)


def _is_plain(tensor: object) -> bool:
    import torch

    return type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter


def _as_autocast(x: Tensor, dtype: torch.dtype) -> Tensor | None:
    """x as autocast to bf16 would have it; without autocast only where it is of this dtype."""
    import torch

    if not torch.is_autocast_enabled("cpu"):
        return x if x.dtype == dtype else None
    return x.to(torch.bfloat16) if torch.get_autocast_dtype("cpu") == torch.bfloat16 else None


class Attention(Protocol):
    """torch.nn.functional.scaled_dot_product_attention"""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor: ...


def _attention(original: Attention) -> Attention:
    import torch

    from flatout.kernels.training_operators import MASK_KINDS
    from flatout.kernels.training_operators import attention as on_matrix_units

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        cast: tuple[Tensor | None, ...] = (None,)
        heads = (query, key, value)
        same = all(_is_plain(one) and one.device.type == "cpu" and one.ndim == 4 for one in heads)
        if same and dropout_p == 0 and key.shape[:3] == value.shape[:3] and query.shape[:2] == key.shape[:2]:
            cast = tuple(_as_autocast(one, torch.bfloat16) for one in heads)
        fits = attn_mask is None or (
            not is_causal
            and _is_plain(attn_mask)
            and not attn_mask.requires_grad
            and attn_mask.dtype in MASK_KINDS
            and attn_mask.ndim == 4
        )
        fitting = [one for one in cast if one is not None]
        fits = fits and len(fitting) == len(heads) and query.shape[-1] == key.shape[-1]
        if not fits or query.numel() * key.shape[2] < LEAST_PRODUCTS:
            return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        query, key, value = fitting
        return on_matrix_units(query, key, value, attn_mask, causal=is_causal, scale=scale)

    return attention


class Gelu(Protocol):
    """torch.nn.functional.gelu"""

    def __call__(self, input: Tensor, *, approximate: str = "none") -> Tensor: ...


def _gelu(original: Gelu) -> Gelu:
    from flatout.kernels.training_operators import gelu as in_one_pass

    def gelu(input: Tensor, *, approximate: str = "none") -> Tensor:
        if approximate == "tanh" and _is_activation(input):  # torch's exact form takes no longer than ours
            return in_one_pass(input, by_tanh=True)
        return original(input, approximate=approximate)

    return gelu


class WrittenOutGelu(Protocol):
    """The forward of a module of transformers that computes the tanh form by itself."""

    def __call__(self, module: object, input: Tensor) -> Tensor: ...


def _written_out_gelu(original: WrittenOutGelu) -> WrittenOutGelu:
    from flatout.kernels.training_operators import gelu as in_one_pass

    def forward(module: object, input: Tensor) -> Tensor:
        return in_one_pass(input, by_tanh=True) if _is_activation(input) else original(module, input)

    return forward


def _is_activation(x: Tensor) -> bool:
    from flatout.kernels.matrix_units import ELEMENTS

    return _is_plain(x) and x.device.type == "cpu" and x.dtype in ELEMENTS and x.numel() >= LEAST_ELEMENTS
