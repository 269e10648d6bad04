"""Flatout's own kernels for a CPU with products of bf16: linear layers, attention and GELU of a training step.

Attention and GELU are computed in bf16 where autocast would do so, or where their inputs are.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any  # Any: arguments of torch.addmm and of kernels

from flatout.levers.idle import Acts, said_if_idle
from flatout.levers.lever import Lever, Saving, Value, Verdict, offer, refuse
from flatout.levers.observed import Observed
from flatout.levers.subject import Subject
from flatout.machine.description import Machine
from flatout.replaced import Replacement, replaced_in_torch
from flatout.torch_private.late import dispatch

if TYPE_CHECKING:
    import torch
    from torch import Tensor

LEAST_IN_LINEAR, LEAST_IN_ATTENTION = 1 << 28, 1 << 24
"""Multiplications of one forward pass: smaller ones gain nothing. On AMX, linear layers were slower than torch's at
2^26 and faster at 2^29 (benchmarks/kernels/bf16_kernels.py)."""
LEAST_ELEMENTS = 1 << 15
"""Of one GELU."""


class Bf16Kernels(Lever):
    """Linear layers, attention and GELU by Flatout's own kernels, on a CPU with AMX or AVX-512 bf16.

    Products are of numbers rounded to bf16, with sums in fp32. With autocast, weights are read as they are and their
    gradients are written in fp32, without copies in bf16; without it, activations stay in fp32. On a CPU without AMX
    the linear layers of autocast stay torch's, which are as fast there.
    """

    name = "bf16 kernels"
    plan_field = "kernels"
    names_value = False
    acts_on_forward = True

    def saving(self, machine: Machine, observed: Observed) -> Saving:
        saved, share, why = observed.saved_by_dtype(machine, "bf16"), _linear_share(observed), ""
        if observed.large_share is not None:
            share = observed.large_share
            why = f"{share:.0%} of a step's products are large enough"
        most = share * max(saved, 0.95 * observed.busy_share)
        return Saving(expected=0.8 * share * saved, least=-0.1, most=most, why=why)

    def applies(self, machine: Machine, observed: Observed) -> Verdict:
        if observed.device != "cpu":
            return refuse("the model is not on the CPU")
        if not machine.cpu.multiplies_bf16:
            return refuse("this CPU has no products of bf16 (AVX-512 bf16 or AMX)")
        if not any(module.linears for module in observed.modules):
            return refuse("the model has no linear layers")
        if observed.large_share == 0:  # before `obstacle`, which may have to build the kernels first
            return refuse("none of a step's products is large enough")
        if observed.differentiates_twice:
            return refuse(f"the kernels' gradients have none of their own: {observed.differentiates_twice}")
        from flatout.kernels.bf16_products import obstacle

        why = obstacle()
        return refuse(why) if why else offer("bf16", reason="this CPU has products of bf16")

    @contextlib.contextmanager
    def apply(self, subject: Subject, value: Value) -> Iterator[None]:
        import torch
        from torch.nn import functional

        from flatout.errors import MachineError
        from flatout.kernels.bf16_products import obstacle

        why = obstacle()
        if why is not None:
            raise MachineError(f"kernels = {value!r} is not possible: {why}")
        from flatout.levers import lazy_scores  # before torch's functions are replaced: it keeps the originals

        taken = _Taken(lazy_scores.is_plain)
        replacements: list[Replacement] = [
            (functional, "linear", taken.linear),
            (torch, "addmm", taken.addmm),
            (functional, "scaled_dot_product_attention", taken.attention),
            (functional, "gelu", taken.gelu),
        ]
        transformers = sys.modules.get("transformers.activations")
        if transformers is not None:
            replacements.append((transformers.NewGELUActivation, "forward", taken.written_out_gelu))
        nothing = "it saw no linear layer, attention or tanh-GELU that is large enough, in fp32 or bf16 on the CPU"
        with replaced_in_torch(*replacements), said_if_idle(subject, self.name, taken.acts, nothing):
            yield


def _linear_share(observed: Observed) -> float:
    """Of the model's products, where they were not counted: by the number of layers, as convolutions stay torch's."""
    linears = sum(module.linears for module in observed.modules)
    return linears / max(1, linears + sum(module.convolutions for module in observed.modules))


Original = Callable[..., "Tensor"]
"""A function of torch, with its arguments, or a kernel."""


class _Taken:
    """Calls of torch's functions that are worth taking over, and can be."""

    def __init__(self, is_plain: Callable[[object], bool]) -> None:
        from flatout.kernels.bf16_products import ELEMENTS, has_matrix_units, readable
        from flatout.kernels.operators import MASK_KINDS, attention, gelu_tanh, linear

        self.acts = Acts()
        self._leaves_autocasts = not has_matrix_units()
        """Those linear layers: on Zen 4 torch's were as fast as ours or up to 14 % faster, copies of weights included;
        language models were x0.87 as fast with ours (benchmarks/kernels/bf16_kernels.py)."""
        self._is_plain, self._readable = is_plain, readable
        self._elements, self._mask_kinds = ELEMENTS, MASK_KINDS
        self._linear, self._attention = self._noted(linear), self._noted(attention)
        self._gelu_tanh = self._noted(gelu_tanh)

    def _noted(self, kernel: Original) -> Original:
        def call(*args: object, **options: Any) -> Tensor:  # each kernel's own
            if not self.acts.any:
                self.acts.note()
            return kernel(*args, **options)

        return call

    def linear(self, original: Original) -> Original:
        def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            fitting = self._input(input, weight, bias)
            return original(input, weight, bias) if fitting is None else self._linear(fitting, weight, bias)

        return linear

    def addmm(self, original: Original) -> Original:
        """A linear layer whose weights are [inputs, outputs], as transformers writes GPT-2's."""

        def addmm(*args: Any, **options: Any) -> Tensor:  # torch has older forms of it too
            if len(args) != 3 or options or not self._ours(*args[1:]) or not args[1].ndim == args[2].ndim == 2:
                return original(*args, **options)
            bias, x, weight = args[0], args[1], args[2].t()
            fitting = self._input(x, weight, bias)
            return original(*args) if fitting is None else self._linear(fitting, weight, bias)

        return addmm

    def _input(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """A layer's input in the dtype that its products are to have; None where torch's own layer is to be called.

        Called for each linear layer: the cheapest checks come first.
        """
        if self._leaves_autocasts and _autocast_is_on():
            self.acts.any = True  # there may be nothing else to do, and that is right
            return None
        if not self._ours(x, weight) or x.ndim < 1 or not self._readable(weight) or x.dtype not in self._elements:
            return None
        outputs, inputs = weight.shape
        if x.shape[-1] != inputs or x.numel() * outputs < LEAST_IN_LINEAR:
            return None
        if bias is not None and (bias.shape != (outputs,) or bias.dtype not in self._elements):
            return None
        return _as_autocast(x, weight.dtype)

    def attention(self, original: Original) -> Original:
        import torch

        def attention(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attn_mask: Tensor | None = None,
            dropout_p: float = 0.0,
            is_causal: bool = False,
            scale: float | None = None,
            **options: object,
        ) -> Tensor:
            heads = (query, key, value)
            if self._attends(heads, attn_mask, is_causal) and dropout_p == 0 and not options.get("enable_gqa"):
                cast = [half for one in heads if (half := _as_autocast(one, torch.bfloat16)) is not None]
                if len(cast) == len(heads):
                    query, key, value = cast
                    return self._attention(query, key, value, attn_mask, causal=is_causal, scale=scale)
            return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **options)

        return attention

    def _attends(self, heads: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, causal: bool) -> bool:
        if not self._ours(*heads) or any(one.ndim != 4 for one in heads):
            return False
        query, key, value = heads
        alike = key.shape[:3] == value.shape[:3] and query.shape[:2] == key.shape[:2]
        if not alike or query.shape[-1] != key.shape[-1] or query.numel() * key.shape[2] < LEAST_IN_ATTENTION:
            return False
        return mask is None or (
            not causal
            and self._ours(mask)
            and not mask.requires_grad
            and mask.dtype in self._mask_kinds
            and mask.ndim == 4
        )

    def gelu(self, original: Original) -> Original:
        def gelu(input: Tensor, *, approximate: str = "none") -> Tensor:
            if approximate == "tanh" and self._is_activation(input):  # for the exact form torch's own is as fast
                return self._gelu_tanh(input)
            return original(input, approximate=approximate)

        return gelu

    def written_out_gelu(self, original: Original) -> Original:
        """Of a module of transformers, which computes the tanh form by itself."""

        def forward(module: object, input: Tensor) -> Tensor:
            return self._gelu_tanh(input) if self._is_activation(input) else original(module, input)

        return forward

    def _is_activation(self, x: Tensor) -> bool:
        return self._ours(x) and x.dtype in self._elements and x.numel() >= LEAST_ELEMENTS

    def _ours(self, *tensors: Tensor) -> bool:
        """torch's own tensors on the CPU, where there is nothing that the operators have no rules for."""
        import torch

        if any(not self._is_plain(one) or one.device.type != "cpu" for one in tensors):
            return False
        return torch.compiler.is_compiling() or not dispatch().beside_autograd()


def _autocast_is_on() -> bool:
    import torch

    return torch.is_autocast_enabled("cpu")


def _as_autocast(x: Tensor, dtype: torch.dtype) -> Tensor | None:
    """x as autocast to bf16 would have it; without autocast only where it is of this dtype."""
    import torch

    if not _autocast_is_on():
        return x if x.dtype == dtype else None
    return x.to(torch.bfloat16) if torch.get_autocast_dtype("cpu") == torch.bfloat16 else None
