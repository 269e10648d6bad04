"""The numbers that trials recorded (`flatout.script.numerics`), as values for the proof."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flatout.script.numerics import NumericsAnswer
from flatout.script.reference import CheckFound, TensorRow


@dataclass(frozen=True, kw_only=True)
class GradientDifference:
    """One parameter's gradient against the plain run's, from the same state and batch."""

    name: str
    error: float
    """|mine - plain|"""
    size: float
    """|plain|"""
    product: float
    """<mine, plain>"""

    @property
    def relative(self) -> float:
        return self.error / self.size if self.size else (math.inf if self.error else 0.0)

    @property
    def scale(self) -> float:
        """Projection on the plain gradient, relative to it: 1 where they differ by noise alone."""
        return self.product / self.size**2 if self.size else 1.0


@dataclass(frozen=True, kw_only=True)
class TensorDifference:
    """A parameter or a buffer against the plain run's."""

    name: str
    error: float
    moved: float
    """How far the plain run's moved since the two were equal."""
    rounding: float
    """The size of one rounding error of every element."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check step: see `flatout.script.reference`."""

    step: int
    same_generators: bool
    unlike: str
    """Why the two runs could not be compared tensor by tensor; '' if they could."""
    replaced: bool
    """Did the optimizer get the plain run's gradients, so that `updates` are due to the optimizer alone?"""
    drift: tuple[TensorDifference, ...]
    gradients: tuple[GradientDifference, ...]
    updates: tuple[TensorDifference, ...]

    @classmethod
    def from_json(cls, data: CheckFound) -> Check:
        return cls(
            step=data["step"],
            same_generators=data["same_generators"],
            unlike=data["unlike"],
            replaced=data["replaced"],
            drift=_tensors(data["drift"]),
            gradients=tuple(GradientDifference(name=n, error=e, size=s, product=p) for n, e, s, p in data["gradients"]),
            updates=_tensors(data["updates"]),
        )


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """What one process recorded."""

    losses: tuple[tuple[float, ...], ...]
    """Per step, every loss that was passed to backward."""
    norms: tuple[float | None, ...]
    by_tensor: tuple[tuple[float, ...], ...] = ()
    """Norm of each parameter's gradient, at evenly spread steps."""
    parameters: tuple[str, ...] = ()
    weight_digest: str = ""
    buffer_digest: str = ""
    generator_digest: str = ""
    finite: bool = True
    """Are all final weights finite?"""
    epochs: tuple[int, ...] = ()
    """Steps before which the training loader made a new iterator."""
    checks: tuple[Check, ...] = ()
    sampled: bool = False
    """True: the model is so large that only a sample of each tensor was compared."""
    ended: bool = False
    """True: the script ended before all requested steps."""
    in_codes: tuple[str, ...] = ()
    """Parameters for which an optimizer held its state in 8-bit codes."""
    unseeded: tuple[str, ...] = ()

    @classmethod
    def from_answer(cls, answer: NumericsAnswer) -> Numerics:
        return cls(
            losses=tuple(tuple(step) for step in answer["losses"]),
            norms=tuple(answer["gradient_norms"]),
            by_tensor=tuple(tuple(step) for step in answer["gradient_norms_by_tensor"]),
            parameters=tuple(answer["parameters"]),
            weight_digest=answer["weight_digest"],
            buffer_digest=answer["buffer_digest"],
            generator_digest=answer["generator_digest"],
            finite=answer["finite"],
            epochs=tuple(answer["epochs"]),
            checks=tuple(Check.from_json(one) for one in answer["checks"]),
            sampled=answer["compared"] == "samples",
            ended=answer["ended"],
            in_codes=tuple(answer["in_codes"]),
            unseeded=tuple(answer["unseeded"]),
        )

    @property
    def steps(self) -> int:
        return len(self.norms)

    def mean_losses(self) -> tuple[float | None, ...]:
        return tuple(sum(step) / len(step) if step else None for step in self.losses)

    def stays_finite(self) -> bool:
        """Is every loss, gradient and final weight a number?"""
        return all(self.are_finite())

    def are_finite(self) -> tuple[bool, ...]:
        """Is it a number: each loss, each step's gradient, the final weights."""
        values = [loss for step in self.losses for loss in step] + [norm or 0.0 for norm in self.norms]
        return (*map(math.isfinite, values), self.finite)


def _tensors(rows: Sequence[TensorRow]) -> tuple[TensorDifference, ...]:
    return tuple(TensorDifference(name=n, error=e, moved=m, rounding=r) for n, e, m, r in rows)
