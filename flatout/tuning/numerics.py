"""The numbers that trials recorded (`flatout.script.numerics`), as values for the proof, and their levels.

For runs whose steps cannot be compared one by one: are they alike in the level of their losses? `not_alike` is for
scripts whose plain runs differ, and compares the sizes of gradients too. `paired_difference` is for two ways to train
from the same seeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flatout.script.numerics import NumericsAnswer
from flatout.script.reference import CheckFound, TensorRow
from flatout.statistics import median, student_95


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


# levels

STATISTICAL_LEAST = 0.01
"""A smaller relative difference in loss is accepted."""
STATISTICAL_RESOLUTION = 0.25
"""Where not even a difference this large would be detected, nothing is proved."""
STATISTICAL_GRADIENT_FACTOR = 1.5


class LevelDifference(NamedTuple):
    """Of the losses in the later half of runs, relative, with half of its 95 % interval."""

    mean: float
    half_width: float
    pairs: int

    @property
    def resolution(self) -> float:
        """The smallest difference that is told from none."""
        return max(self.half_width, STATISTICAL_LEAST)

    def __str__(self) -> str:
        return f"{self.mean:+.1%} (±{self.half_width:.1%})"


def paired_difference(plains: Sequence[Numerics], others: Sequence[Numerics]) -> LevelDifference | None:
    """How much the losses of `others` are above those of the plain runs from the same seeds; None without losses."""
    levels = [[_late_level(run) for run in runs] for runs in (plains, others)]
    pairs = [(a, b) for a, b in zip(*levels, strict=True) if a is not None and b is not None]
    if len(pairs) < 2:
        return None
    scale = sum(abs(a) for a, _ in pairs) / len(pairs) or 1.0
    differences = [(b - a) / scale for a, b in pairs]
    mean, freedom = sum(differences) / len(pairs), len(pairs) - 1
    variance = sum((one - mean) ** 2 for one in differences) / freedom
    return LevelDifference(mean, student_95(freedom) * math.sqrt(variance / len(pairs)), len(pairs))


def not_alike(plains: Sequence[Numerics], candidates: Sequence[Numerics]) -> tuple[str | None, float | None]:
    """(why the candidate's runs differ from the plain ones, or nothing is proved; the smallest relative difference in
    loss that would have been detected)"""
    if not all(run.stays_finite() for run in candidates) and all(run.stays_finite() for run in plains):
        return "its numbers become infinite or NaN where the plain script's stay finite", None
    if {run.parameters for run in plains} != {run.parameters for run in candidates}:
        return "it trains other parameters", None
    least, most = (min(run.steps for run in runs) for runs in (candidates, plains))
    if least < most:
        return f"it ends after {least} steps, plain runs after {most} at least", None
    if reason := _gradient_levels(plains, candidates):
        return reason, None
    levels = [[_late_level(run) for run in runs] for runs in (plains, candidates)]
    if any(level is None for side in levels for level in side):
        return "plain runs of the script differ, and it shows no losses to compare", None
    ours, theirs = ([level for level in side if level is not None] for side in levels)
    scale = sum(abs(level) for level in ours) / len(ours) or 1.0
    difference = (sum(theirs) / len(theirs) - sum(ours) / len(ours)) / scale
    half = _half_width(ours, theirs) / scale
    if not (math.isfinite(difference) and math.isfinite(half)):
        return "losses of the script itself are inf or NaN: there is nothing to compare", None
    seen = max(half, STATISTICAL_LEAST)
    if abs(difference) > seen:
        return f"its losses are {difference:+.1%} (±{half:.1%}) off those of plain runs", seen
    if half > STATISTICAL_RESOLUTION:
        reason = f"plain runs differ so much that a difference of {half:.0%} would not be detected"
        return reason, seen
    return None, seen


def _gradient_levels(plains: Sequence[Numerics], candidates: Sequence[Numerics]) -> str | None:
    """Why the typical gradient of some parameter is much larger or smaller than in plain runs, or None. Where not every
    step has equally many, only the whole gradient is compared."""
    ours, theirs = ([_typical_norms(run) for run in runs] for runs in (plains, candidates))
    plain_counts, counts = ({len(one) for one in side} for side in (ours, theirs))
    if len(plain_counts) == len(counts) == 1 and plain_counts != counts and 0 not in plain_counts | counts:
        return f"{counts.pop()} parameters get gradients, {plain_counts.pop()} in plain runs"
    names = plains[0].parameters if plain_counts == {len(plains[0].parameters)} else ()
    if len(plain_counts | counts) > 1 or 0 in counts:
        ours, theirs = ([_typical_whole(run) for run in runs] for runs in (plains, candidates))
    for index in range(min(len(one) for one in (*ours, *theirs))):
        before, after = [one[index] for one in ours], [one[index] for one in theirs]
        if min(before) <= 0:
            continue
        spread = max(before) / min(before)
        ratio = median(after) / median(before)
        if not 1 / (STATISTICAL_GRADIENT_FACTOR * spread**2) < ratio < STATISTICAL_GRADIENT_FACTOR * spread**2:
            name = f"the gradient of {names[index]}" if names else "a gradient"
            return f"{name} is typically x{ratio:.2f} that of plain runs"
    return None


def _typical_whole(run: Numerics) -> list[float]:
    norms = [norm for norm in run.norms if norm is not None]
    return [median(norms)] if norms else []


def _typical_norms(run: Numerics) -> list[float]:
    """Of each parameter's gradient; none where the number of gradients varies from step to step."""
    lengths = {len(step) for step in run.by_tensor}
    if len(lengths) != 1:
        return []
    return [median([step[i] for step in run.by_tensor]) for i in range(lengths.pop())]


def _late_level(run: Numerics) -> float | None:
    losses = [loss for loss in run.mean_losses() if loss is not None]
    half = losses[len(losses) // 2 :]
    return sum(half) / len(half) if half else None


def _half_width(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Half the 95 % interval of the difference of two means, with runs as samples."""
    freedom = len(ours) + len(theirs) - 2
    squares = sum(sum((x - sum(side) / len(side)) ** 2 for x in side) for side in (ours, theirs))
    return student_95(freedom) * math.sqrt(squares / freedom * (1 / len(ours) + 1 / len(theirs)))
