"""The gradients of all parameters that a script trains, as the mean over the ranks.

Averaging is linear: a mean that further passes have added to is averaged again, and gradients that nobody wrote to
since stay what they are. So it does not matter how often the script reads its gradients, as long as all ranks read them
at the same places: they are averaged right before the first reader, an optimizer's step or what clips them.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flatout.levers.grad_attribute import get_grad, set_grad
from flatout.parallel.averaging import are_sent_as_they_are, packets, sent_by_first
from flatout.parameters import parameters_of
from flatout.tensor_bytes import bytes_view

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup
    from torch.optim import Optimizer

COMPARED_TENSORS, COMPARED_NUMBERS = 32, 256
"""Of the weights, in the digest that ranks compare."""


class Trained:
    """The optimizers and models of a script, in the order in which they appeared: the same on all ranks."""

    def __init__(self) -> None:
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._modules: list[weakref.ref[nn.Module]] = []

    def add_optimizer(self, optimizer: Optimizer) -> None:
        self._optimizers.append(weakref.ref(optimizer))

    def add_module(self, module: nn.Module) -> None:
        self._modules.append(weakref.ref(module))

    @property
    def optimizers(self) -> list[Optimizer]:
        return [one for reference in self._optimizers if (one := reference()) is not None]

    @property
    def modules(self) -> list[nn.Module]:
        return [one for reference in self._modules if (one := reference()) is not None]

    def parameters(self) -> list[Tensor]:
        """Each once: those of the optimizers, then those of the models that no optimizer holds (a clip counts their
        gradients too)."""
        held = {id(one): one for optimizer in self.optimizers for one in parameters_of(optimizer)}
        own = {id(one): one for module in self.modules for one in module.parameters() if one.requires_grad}
        return list({**held, **own}.values())

    def rates(self) -> int:
        """A digest of all learning rates on the host."""
        rates = [group.get("lr") for optimizer in self.optimizers for group in optimizer.param_groups]
        plain = [float(rate) for rate in rates if not getattr(rate, "is_cuda", False) and rate is not None]
        return hash(tuple(plain))


def flags_digest(parameters: Sequence[Tensor]) -> int:
    """Which of them have a gradient, and how many there are."""
    return hash(tuple(get_grad(one) is not None for one in parameters))


def weights_digest(parameters: Sequence[Tensor]) -> int:
    """Of some numbers of some of them, to the bit; waits for the device."""
    import torch

    chosen = parameters[:: max(1, len(parameters) // COMPARED_TENSORS)][:COMPARED_TENSORS]
    found = hashlib.blake2b(digest_size=7)
    with torch.no_grad():
        for one in chosen:
            found.update(bytes_view(one.detach().reshape(-1)[:COMPARED_NUMBERS]).numpy().tobytes())
    return int.from_bytes(found.digest(), "big")


def sparse_name(parameters: Sequence[Tensor]) -> str:
    """What a sparse gradient belongs to; '' where there is none."""
    import torch

    for one in parameters:
        gradient = get_grad(one)
        if gradient is not None and gradient.layout != torch.strided:
            return f"a parameter of shape {list(one.shape)}"
    return ""


def average(parameters: Sequence[Tensor], group: ProcessGroup, *, same_flags: bool) -> None:
    """The mean of the ranks' gradients, in place; a rank without one counts as 0.

    same_flags: do all ranks have gradients of the same parameters?
    """
    import torch
    from torch import distributed

    ranks = group.size()
    with torch.no_grad():
        if not same_flags:
            _fill_in(parameters, group)
        gradients = [gradient for one in parameters if (gradient := get_grad(one)) is not None]
        for packet in packets(gradients):
            flat = torch.cat([one.reshape(-1) for one in packet])
            distributed.all_reduce(flat, group=group)
            flat /= ranks
            _copy(flat, packet)


def _fill_in(parameters: Sequence[Tensor], group: ProcessGroup) -> None:
    """Zeros for the gradients that other ranks have and this one has not."""
    import torch
    from torch import distributed

    counts = torch.tensor([get_grad(one) is not None for one in parameters], dtype=torch.int32)
    distributed.all_reduce(counts, group=group)
    for one, count in zip(parameters, counts.tolist(), strict=True):
        if count and get_grad(one) is None:
            set_grad(one, torch.zeros_like(one))


def from_first(tensors: Sequence[Tensor], group: ProcessGroup) -> None:
    """Give every rank the first rank's values, in place."""
    import torch
    from torch import distributed

    together: list[Tensor] = []
    alone: list[Tensor] = []
    for one in tensors:
        (together if are_sent_as_they_are([one]) else alone).append(one)
    sent_by_first(alone, group)
    with torch.no_grad():
        for packet in packets([one.detach() for one in together]):
            flat = torch.cat([one.reshape(-1) for one in packet])
            distributed.broadcast(flat, 0, group=group)
            _copy(flat, packet)


def _copy(flat: Tensor, packet: Sequence[Tensor]) -> None:
    for one, part in zip(packet, flat.split([one.numel() for one in packet]), strict=True):
        one.copy_(part.view(one.shape))
