"""Sizes of gradients by layer, whether the weights move, and which parameters no optimizer updates.

Of parameters that are spread over ranks (FSDP2) only this rank's part is read: the whole would take collectives, in
which no other rank takes part.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flatout.parameters import own_part
from flatout.script.behaviour_seen import GradientsSeen, LayerGradients, ParametersSeen

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

MOST_LAYERS, MOST_VECTORS = 48, 16
SAMPLED = 4
"""Parameters of an optimizer that are followed through its steps."""
MOST_NUMBERS = 8192
MOST_REACHED = 4096
MOST_NAMES = 8


@dataclass
class _Sample:
    """A part of a parameter before an optimizer's step."""

    parameter: Tensor
    before: Tensor
    moves: Tensor
    """Where the gradient is not zero; everywhere where no parameter has one, as an optimizer may need none."""


@dataclass
class _Followed:
    """A module, and step by step the sizes of its gradients."""

    module: weakref.ref[nn.Module]
    weights: list[tuple[str, nn.Parameter]]
    vectors: list[nn.Parameter]
    rms: list[list[float]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    largest_vectors: list[float] = field(default_factory=list)
    nonfinite_steps: int = 0
    first_nonfinite: str = ""


class GradientWatch:
    """`measure` before steps of an optimizer, `compare` after them."""

    def __init__(self) -> None:
        self._followed: dict[int, _Followed] = {}
        self._samples: list[_Sample] = []
        self._unchanged = self._changed = 0
        self._reached: dict[int, tuple[weakref.ref[nn.Parameter], Tensor]] = {}
        """Parameters that a loss reaches, with a part of each as it was then."""

    def reach(self, parameters: Iterable[nn.Parameter]) -> None:
        """Parameters that the graph of a loss leads to."""
        for one in parameters:
            if id(one) not in self._reached and len(self._reached) < MOST_REACHED and _is_there(one):
                self._reached[id(one)] = weakref.ref(one), _part(one).clone()

    def measure(self, modules: Iterable[nn.Module], optimizer: Optimizer | None, held: set[int]) -> None:
        """Sizes of the gradients by layer, and a part of the weights, to compare after the step.

        held: ids of the optimizer's parameters."""
        import torch

        with torch.no_grad():
            for module in modules:
                self._measure_module(module, held)
        self.sample(optimizer)

    def sample(self, optimizer: Optimizer | None) -> None:
        """A part of the weights alone, to compare after the step."""
        import torch

        with torch.no_grad():
            held = parameters_in(optimizer)
            found = [one for one in held if one.grad is None or not one.grad.is_sparse]
            if any(one.grad is not None for one in held):
                found = [one for one in found if one.grad is not None]
            for one in found[:: max(1, len(found) // SAMPLED)][:SAMPLED]:
                part = _part(one)
                moves = torch.ones_like(part, dtype=torch.bool) if one.grad is None else _part(one.grad) != 0
                self._samples.append(_Sample(one, part.clone(), moves))

    def _measure_module(self, module: nn.Module, held: set[int]) -> None:
        followed = self._followed.get(id(module))
        if followed is None or followed.module() is not module:
            weights = [(name, one) for name, one in module.named_parameters() if one.ndim >= 2]
            vectors = [one for one in module.parameters() if one.ndim == 1]
            followed = self._followed[id(module)] = _Followed(
                weakref.ref(module),
                weights[:: max(1, -(-len(weights) // MOST_LAYERS))],
                vectors[-MOST_VECTORS:],  # the last ones are those next to the loss
            )
        if not any(id(one) in held for _, one in followed.weights):
            return
        gradients = [_values(one.grad) for _, one in followed.weights]
        if all(gradient is None for gradient in gradients):
            return  # that is no gradient of 0
        rms, squares, worst = [], 0.0, ""
        for (name, one), gradient in zip(followed.weights, gradients, strict=True):
            if gradient is None:
                rms.append(0.0)
                continue
            norm = float(gradient.norm())
            finite = norm == norm and norm != float("inf")
            worst = worst or ("" if finite else name)
            rms.append(norm / max(1, own_part(one).numel()) ** 0.5 if finite else 0.0)
            squares += norm * norm if finite else 0.0
        followed.nonfinite_steps += bool(worst)
        followed.first_nonfinite = followed.first_nonfinite or worst
        followed.rms.append(rms)
        followed.norms.append(squares**0.5)
        of_vectors = [_values(one.grad) for one in followed.vectors]
        sizes = [float(one.norm()) / max(1, one.numel()) ** 0.5 for one in of_vectors if one is not None]
        followed.largest_vectors.append(max((one for one in sizes if one < math.inf), default=0.0))

    def compare(self) -> None:
        """After an optimizer's step: at the next one, or at the end of the training step.

        Not at the next backward pass, which may be one of the optimizer's own, as in LBFGS."""
        samples, self._samples = self._samples, []
        for one in samples:
            same = int(((_part(one.parameter) == one.before) & one.moves).sum())
            self._unchanged += same
            self._changed += int(one.moves.sum()) - same

    def stop(self) -> None:
        self._samples.clear()

    # what was found

    def gradients(self) -> tuple[GradientsSeen, ...]:
        return tuple(
            GradientsSeen(
                module=type(module).__name__,
                layers=tuple(
                    LayerGradients(name=name, depth=index, rms=tuple(row[index] for row in one.rms))
                    for index, (name, _) in enumerate(one.weights)
                ),
                norms=tuple(one.norms),
                largest_vectors=tuple(one.largest_vectors),
                weight_norm=_norm([weight for _, weight in one.weights]),
                nonfinite_steps=one.nonfinite_steps,
                first_nonfinite=one.first_nonfinite,
            )
            for one in self._followed.values()
            if one.rms and (module := one.module()) is not None
        )

    def outside_optimizer(
        self, optimizers: Iterable[Optimizer], others: Callable[[], Iterable[Optimizer]] = list
    ) -> ParametersSeen | None:
        """Parameters with a gradient that a loss reaches, no optimizer holds and nothing has changed since then.

        None as well where no optimizer holds anything that a loss reaches: the script updates weights by itself.
        others: finds further optimizers, which takes long; asked for only where the known ones do not hold all.
        """
        held = {id(one) for optimizer in optimizers for one in parameters_in(optimizer)}
        alive = [(one, before) for reference, before in self._reached.values() if (one := reference()) is not None]
        if all(id(one) in held for one, _ in alive):
            return None
        held |= {id(one) for optimizer in others() for one in parameters_in(optimizer)}
        if not any(id(one) in held for one, _ in alive):
            return None
        left = [
            one
            for one, before in alive
            if id(one) not in held and one.requires_grad and one.grad is not None and bool((_part(one) == before).all())
        ]
        if not left:
            return None
        known = [(module, names_in(module)) for one in self._followed.values() if (module := one.module()) is not None]
        module = next((module for module, names in known if any(id(one) in names for one in left)), None)
        names = {identity: name for _, own in known for identity, name in own.items()}
        order = {identity: place for place, identity in enumerate(names)}
        left.sort(key=lambda one: order.get(id(one), len(order)))
        return ParametersSeen(
            names=tuple(names.get(id(one)) or f"one of shape {list(one.shape)}" for one in left[:MOST_NAMES]),
            count=sum(one.numel() for one in left),
            module=type(module).__name__ if module is not None else "",
        )

    @property
    def unchanged_share(self) -> float | None:
        compared = self._unchanged + self._changed
        return self._unchanged / compared if compared else None

    @property
    def weights_move(self) -> bool | None:
        compared = self._unchanged + self._changed
        return self._changed > 0 if compared else None


def parameters_in(optimizer: Optimizer | None) -> list[Tensor]:
    return [one for group in optimizer.param_groups for one in group["params"]] if optimizer is not None else []


def names_in(module: nn.Module) -> dict[int, str]:
    """Id of a parameter -> its name, also of those in plain lists and dicts, which a module does not register."""
    names = {id(one): f"{path}{name}" for path, part in _parts(module) for name, one in part.named_parameters()}
    return {id(one): name for name, one in module.named_parameters()} | {
        identity: name for identity, name in names.items() if identity not in {id(one) for one in module.parameters()}
    }


def _parts(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(path, module) of modules in the plain lists, tuples and dicts of a module and of its submodules."""
    from torch import nn

    for prefix, owner in module.named_modules():
        for name, value in vars(owner).items():
            if name in ("_modules", "_parameters", "_buffers"):
                continue
            listed = value if isinstance(value, list | tuple) else ()
            items = value.items() if isinstance(value, dict) else enumerate(listed)
            for key, one in items:
                if isinstance(one, nn.Module):
                    yield f"{prefix + '.' if prefix else ''}{name}[{key!r}].", one


def _part(tensor: Tensor) -> Tensor:
    return own_part(tensor.detach()).reshape(-1)[:MOST_NUMBERS]


def _is_there(parameter: Tensor) -> bool:
    """Has it memory? What FSDP2 gathers from all ranks has none between the passes."""
    own = own_part(parameter.detach())
    return own.numel() == 0 or own.untyped_storage().nbytes() > 0


def _values(gradient: Tensor | None) -> Tensor | None:
    """What is here of one that is spread over ranks, and what is there of a sparse one."""
    own = None if gradient is None else own_part(gradient.detach())
    return own.coalesce().values() if own is not None and own.is_sparse else own


def _norm(weights: Sequence[Tensor]) -> float:
    """Of all together; 0 where they are not finite."""
    norm = math.hypot(*(float(own_part(one.detach()).norm()) for one in weights))
    return norm if math.isfinite(norm) else 0.0
