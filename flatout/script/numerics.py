"""What a run computed, in a form small enough to compare between processes.

Every step: each loss passed to backward, and the norm of the gradients; for some steps the norm of each parameter's
gradient. At the end: digests of weights, buffers and generators. At check steps, against a reference of the plain run:
what `flatout.script.reference` compares.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict

from flatout.levers.low_bit import is_in_codes
from flatout.levers.subject import Subject
from flatout.parameters import own_part, parameters_of, state_of
from flatout.script.reference import (
    CheckFound,
    Reference,
    ReferenceReader,
    ReferenceWriter,
    generator_digest,
    held_by,
    named_weights,
)
from flatout.tensor_bytes import bytes_view

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.optim import Optimizer

Role = Literal["free", "reference", "checked"]
Nudge = Literal["none", "rounding", "16-bit"]

STEPS_BY_TENSOR = 64
"""Evenly spread steps for which the gradient norm of each parameter is kept."""
BITS_OF_16 = 2.0**-8


@dataclass(frozen=True, kw_only=True)
class NumericsRequest:
    """What a trial is to record."""

    steps: int
    role: Role = "free"
    folder: str = ""
    """Where the reference is; only this process and later trials read and write it."""
    checks: tuple[int, ...] = ()
    """Steps (from 0) at which a reference is written."""
    nudge: Nudge = "none"
    """Move every weight by one rounding error, of its own format or of 16 bits: of a free run at its start, of a
    checked one at every check step, after it has loaded the plain run's state."""
    nudge_ulps: int = 1
    """By this many instead of one, where it is of its own format."""
    nudge_seed: int = 0
    """Which weights move up and which down."""
    gradient_noise: float = 0.0
    """Added to each gradient before the optimizer takes it, or an update by the script itself; a share of its size."""
    weight_noise: bool = False
    """Take the gradients of each step at weights that are moved by up to a rounding error of bf16."""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> NumericsRequest:  # JSON
        return cls(**{**data, "checks": tuple(data["checks"])})


class NumericsFound(TypedDict):
    """What a NumericsRecorder found, as JSON for the parent of a trial; see `flatout.tuning.numerics.Numerics`."""

    losses: list[list[float]]
    gradient_norms: list[float | None]
    gradient_norms_by_tensor: list[list[float]]
    parameters: list[str]
    weight_digest: str
    buffer_digest: str
    generator_digest: str
    finite: bool
    checks: list[CheckFound]
    in_codes: list[str]
    compared: Literal["every element", "samples"]


class NumericsAnswer(NumericsFound):
    """The answer of a trial."""

    ended: bool
    """Did the script end before all requested steps?"""
    unseeded: list[str]
    peak_resident_bytes: int | None
    """Of the process; None: unknown."""


class WatchedSteps(Protocol):
    """What a recorder listens to."""

    subject: Subject
    at_backward: list[Callable[[tuple[Tensor, ...]], None]]
    before_optimizer: list[Callable[[Optimizer], None]]

    @property
    def inside_optimizer(self) -> bool: ...


class NumericsRecorder:
    """Records the steps between its creation and `finish`. Make it at a step boundary."""

    def __init__(self, watch: WatchedSteps, request: NumericsRequest) -> None:
        self._watch, self._request = watch, request
        self._gradient_noise = GradientNoise(request.gradient_noise)
        self._weight_noise = WeightNoise() if request.weight_noise else None
        self._losses: list[list[Tensor]] = [[]]
        self._norms: list[Tensor | None] = []
        self._by_tensor: dict[int, list[Tensor]] = {}
        self._step_norms: list[Tensor] = []
        self._every = max(1, request.steps // STEPS_BY_TENSOR)
        self._reference = _reference(watch.subject, request)
        watch.at_backward.append(self._backward)
        watch.before_optimizer.append(self._optimizer)
        watch.subject.before_update.append(self._update)
        self._early: dict[int, Tensor] = {}
        """By identity of their parameter, gradients that a backward pass has already applied."""
        if request.nudge == "16-bit" and request.role == "free":
            nudge_weights(watch.subject, BITS_OF_16)
        self._step_begins()

    @property
    def steps(self) -> int:
        return len(self._norms)

    def step_ended(self) -> None:
        if self._weight_noise is not None:
            self._weight_noise.remove()
        if not self._step_norms:  # no optimizer: the gradients are still there when the pass ends
            self._take_gradients([p for module in self._watch.subject.modules for p in module.parameters()])
        self._norms.append(_total(self._step_norms))
        if (self.steps - 1) % self._every == 0:
            self._by_tensor[self.steps - 1] = self._step_norms
        if self._reference is not None:
            self._reference.after_step([float(loss) for loss in self._losses[-1]])
        self._step_norms = []
        self._losses.append([])
        self._step_begins()

    def finish(self) -> NumericsFound:
        self._watch.at_backward.remove(self._backward)
        self._watch.before_optimizer.remove(self._optimizer)
        self._watch.subject.before_update.remove(self._update)
        weights, modules = named_weights(self._watch.subject), self._watch.subject.modules
        reader = self._reference if isinstance(self._reference, ReferenceReader) else None
        return {
            "losses": [[float(loss) for loss in losses] for losses in self._losses[: self.steps]],
            "gradient_norms": [float(norm) if norm is not None else None for norm in self._norms],
            "gradient_norms_by_tensor": [
                [float(value) for norms in step for value in norms.tolist()] for step in self._by_tensor.values()
            ],
            "parameters": list(weights),
            "weight_digest": _digest(list(weights.values())),
            "buffer_digest": _digest([own_part(one) for module in modules for one in module.buffers()]),
            "generator_digest": generator_digest(),
            "finite": all(bool(tensor.isfinite().all()) for tensor in weights.values()),
            "checks": reader.found if reader else [],
            "in_codes": _in_codes(self._watch.subject, weights),
            "compared": "every element" if reader is None or reader.whole else "samples",
        }

    def _step_begins(self) -> None:
        request, subject = self._request, self._watch.subject
        if self.steps >= request.steps:
            return
        if self._reference is not None:
            self._reference.before_step(self.steps)
            if self.steps in self._reference.checks and request.nudge != "none":
                relative = BITS_OF_16 if request.nudge == "16-bit" else None
                nudge_weights(subject, relative, ulps=request.nudge_ulps, seed=request.nudge_seed)
        if request.gradient_noise:
            self._gradient_noise.add_to(held_by(subject))
        if self._weight_noise is not None:
            if self._reference is not None and self.steps in self._reference.checks:
                self._weight_noise.draw(subject, self.steps)
            self._weight_noise.add()

    def _backward(self, roots: tuple[Tensor, ...]) -> None:
        self._losses[-1] += [_in_reals(root.detach()).float().mean() for root in roots if hasattr(root, "detach")]
        if isinstance(self._reference, ReferenceWriter):
            self._reference.backward(self._watch.inside_optimizer)

    def _optimizer(self, optimizer: Optimizer) -> None:
        parameters = parameters_of(optimizer)
        if self._weight_noise is not None:
            self._weight_noise.remove()
        self._gradient_noise.add_to(parameters)
        self._take_gradients(parameters)
        if self._reference is not None:
            self._reference.optimizer(parameters, self._early)
        for parameter in parameters:
            self._early.pop(id(parameter), None)

    def _update(self, parameters: list[Tensor], parameter: Tensor, ahead: int) -> None:
        assert parameter.grad is not None
        self._early[id(parameter)] = parameter.grad.detach().clone()
        if isinstance(self._reference, ReferenceReader):  # the plain run has no updates in its backward passes
            self._reference.update(parameters, parameter, ahead)

    def _take_gradients(self, parameters: list[Tensor]) -> None:
        import torch

        from flatout.torch_private.tensors import foreach_norm

        found = [self._early.get(id(p), p.grad) for p in parameters]
        gradients = [own_part(gradient.detach()) for gradient in found if gradient is not None]
        gradients = [g.coalesce().values() if g.is_sparse else g for g in gradients]
        if gradients:
            norms = foreach_norm([_in_reals(g).float() for g in gradients])
            self._step_norms.append(torch.stack([norm.cpu() for norm in norms]))


def _in_reals(tensor: Tensor) -> Tensor:
    """Complex numbers as pairs."""
    import torch

    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _in_codes(subject: Subject, weights: Mapping[str, Tensor]) -> list[str]:
    """Names of the parameters for which an optimizer holds state in low-bit codes."""
    names = {tensor.data_ptr(): name for name, tensor in weights.items()}
    return [
        names[address]
        for optimizer in subject.optimizers
        for parameter in parameters_of(optimizer)
        if (address := own_part(parameter.detach()).data_ptr()) in names
        and any(is_in_codes(value) for value in state_of(optimizer, parameter).values())
    ]


def _reference(subject: Subject, request: NumericsRequest) -> Reference | None:
    folder = Path(request.folder)
    if request.role == "reference":
        return ReferenceWriter(folder, subject, request.checks)
    if request.role == "checked":
        return ReferenceReader(
            folder, subject, own_gradients=request.nudge != "none" or request.gradient_noise > 0 or request.weight_noise
        )
    return None


def nudge_weights(subject: Subject, relative: float | None = None, *, ulps: int = 1, seed: int = 0) -> None:
    """Move every weight by about `ulps` rounding errors of its format (or by `relative`), up or down: the effect is the
    script's own noise floor. Draws from a separate generator."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in named_weights(subject).values():
            if tensor.is_floating_point() or tensor.is_complex():
                signs = torch.randint(0, 2, tensor.shape, generator=generator, dtype=torch.int8, device="cpu") * 2 - 1
                amount = relative or ulps * torch.finfo(tensor.dtype).eps  # units in the last place of a number near 1
                tensor.mul_(1 + amount * signs.to(device=tensor.device, dtype=tensor.dtype))


class GradientNoise:
    """Noise of `share` of each gradient's norm, uniform over its nonzero elements. Draws from a separate generator."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._generators: dict[torch.device, torch.Generator] = {}
        """By device."""

    def add_to(self, parameters: list[Tensor]) -> None:
        import torch

        for parameter in parameters:
            gradient = None if parameter.grad is None else own_part(parameter.grad.detach())
            if not self._share or gradient is None or gradient.is_sparse:
                continue
            if gradient.device not in self._generators:
                self._generators[gradient.device] = torch.Generator(gradient.device).manual_seed(0)
            with torch.no_grad():
                there = gradient != 0
                size = gradient.norm() / there.sum().clamp(min=1).sqrt()
                noise = torch.empty_like(gradient).normal_(generator=self._generators[gradient.device])
                gradient.add_(noise.mul_(there).mul_(self._share * size))


class WeightNoise:
    """Moves every weight by up to a rounding error of bf16 while the gradients of a step are taken, and back before
    they are applied: this is what products of bf16 do. Unlike noise in the gradients it is large where training is
    sensitive. It stays the same until another is drawn, as what is rounded up in a step is so in the next ones, too.
    Draws from a separate generator."""

    def __init__(self) -> None:
        self._noise: list[tuple[Tensor, Tensor]] = []
        """(weight, the share of it by which it is moved); none of 16-bit formats, which are rounded already."""
        self._is_added = False

    def draw(self, subject: Subject, seed: int) -> None:
        """Draw other noise, while none is added."""
        import torch

        generator, most = torch.Generator().manual_seed(seed), BITS_OF_16 / 2
        self._noise = []
        for weight in named_weights(subject).values():
            if weight.dtype in (torch.float32, torch.float64):
                noise = torch.empty(weight.shape, device="cpu").uniform_(-most, most, generator=generator)
                self._noise.append((weight, noise.to(device=weight.device, dtype=torch.bfloat16)))  # half as large

    def add(self) -> None:
        import torch

        self._is_added = True
        with torch.no_grad():
            for weight, noise in self._noise:
                weight.mul_(1 + noise.to(weight.dtype))

    def remove(self) -> None:
        """Does nothing where none was added."""
        import torch

        was_added, self._is_added = self._is_added, False
        with torch.no_grad():
            for weight, noise in self._noise if was_added else ():
                weight.div_(1 + noise.to(weight.dtype))


def _total(norms: list[Tensor]) -> Tensor | None:
    import torch

    return torch.cat(norms).norm() if norms else None


def _digest(tensors: list[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(bytes_view(tensor).numpy().tobytes())
    return digest.hexdigest()
