"""Are the numbers still right? Losses, gradients and weights of fresh processes from one seed, step by step.

Four runs: the plain script twice (what it differs by from itself), the plain script with every weight moved by one
rounding error (what rounding grows to in this very training), and the candidate. Training is chaotic: after some
hundred steps a single rounding error may show in the third digit, so 'within rounding' means: not farther from the
plain run than a run that differs by rounding alone, within a factor; and in the first steps, where nothing has
grown yet, each parameter's gradient must agree closely.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flatout.plan import Exactness
from flatout.statistics import median
from flatout.tune.trial import Proof

ROUNDING_FACTOR = 40.0
"""A lever rounds at every operation of every step, the nudge only once: so many times its effect is still rounding."""
GRADIENT_ROUNDING_FLOOR = 3e-5
LOSS_ROUNDING_FLOOR = 2e-6
REDUCED_GRADIENT_LIMIT = 0.25
"""bf16 keeps 8 bits: single products are off by 0.4 %, deep gradients by some percent; beyond this it is an error."""
REDUCED_DRIFT_LIMIT = 0.01
"""Mean loss of the later half may differ by 1 % of the loss, or by three times the script's own spread."""
LOSS_TOLERANCE_OF_GAIN = 0.05
"""... or by this share of what the training has gained so far: a loss near 0 makes any percentage large."""


@dataclass(frozen=True)
class Numerics:
    """What one process recorded."""

    losses: tuple[float | None, ...]
    norms: tuple[float | None, ...]
    gradient_samples: tuple[tuple[tuple[float, ...], ...], ...]
    digest: str
    weights: tuple[float, ...]

    @classmethod
    def from_answer(cls, answer: Mapping[str, Any]) -> Numerics:
        return cls(
            losses=tuple(answer["losses"]),
            norms=tuple(answer["gradient_norms"]),
            gradient_samples=tuple(tuple(tuple(t) for t in step) for step in answer["gradient_samples"]),
            digest=answer["weight_digest"],
            weights=tuple(answer["weight_sample"]),
        )

    @property
    def steps(self) -> int:
        return len(self.norms)

    def same_bits(self, other: Numerics) -> bool:
        return _equal(self.losses, other.losses) and _equal(self.norms, other.norms) and self.digest == other.digest


def judge(plain: Numerics, again: Numerics, nudged: Numerics, candidate: Numerics, *, claimed: Exactness) -> Proof:
    """The verdict on `candidate`, whose levers claim to be `claimed` at worst."""
    found = _Differences.between(plain, candidate)
    floors = [_Differences.between(plain, again), _Differences.between(plain, nudged)]
    repeatable = plain.same_bits(again)
    verdict, reason = _verdict(plain, candidate, found, floors, claimed, repeatable)
    if verdict == "rejected" and found.finite and not floors[0].comparable:
        verdict, reason = _statistical(found, floors)
    return Proof(
        verdict=verdict,  # type: ignore[arg-type]
        reason=reason,
        steps=min(plain.steps, candidate.steps),
        loss_difference=found.loss,
        loss_floor=_largest(floor.loss for floor in floors),
        gradient_difference=found.gradient,
        gradient_floor=_largest(floor.gradient for floor in floors),
        weight_difference=found.weight,
        weight_floor=_largest(floor.weight for floor in floors),
        loss_drift=found.drift,
        drift_floor=_largest(abs(floor.drift) if floor.drift is not None else None for floor in floors),
        repeatable=repeatable,
        notes=_notes(repeatable, floors[0]),
        baseline_losses=plain.losses,
        candidate_losses=candidate.losses,
    )


@dataclass(frozen=True)
class _Differences:
    """How far one run lies from another; everything relative, None where it cannot be told."""

    loss: float | None
    loss_curve: tuple[float, ...]
    gradient: float | None
    per_tensor: tuple[float, ...]
    weight: float | None
    drift: float | None
    drift_of_gain: float | None
    finite: bool

    @property
    def comparable(self) -> bool:
        """False where the two runs did not even start from the same data and weights."""
        return not self.loss_curve or self.loss_curve[0] < 1e-3

    @classmethod
    def between(cls, a: Numerics, b: Numerics) -> _Differences:
        pairs = [(x, y) for x, y in zip(a.losses, b.losses, strict=False) if x is not None and y is not None]
        finite_a = all(math.isfinite(x) for x, _ in pairs)
        finite = not finite_a or all(math.isfinite(y) for _, y in pairs)
        pairs = [(x, y) for x, y in pairs if math.isfinite(x) and math.isfinite(y)]
        scale = median([abs(x) for x, _ in pairs]) if pairs else 0.0
        curve = tuple(abs(x - y) / scale if scale else float(x != y) for x, y in pairs)
        per_tensor = _gradient_errors(a, b)
        drift, of_gain = _drift(pairs)
        return cls(
            loss=max(curve) if curve else None,
            loss_curve=curve,
            gradient=max(per_tensor) if per_tensor else None,
            per_tensor=per_tensor,
            weight=_relative(a.weights, b.weights),
            drift=drift,
            drift_of_gain=of_gain,
            finite=finite and _as_finite(a.norms, b.norms) and _as_finite(a.weights, b.weights),
        )


def _verdict(
    plain: Numerics,
    candidate: Numerics,
    found: _Differences,
    floors: Sequence[_Differences],
    claimed: Exactness,
    repeatable: bool,
) -> tuple[str, str]:
    if plain.same_bits(candidate):
        return "bit-same", "losses, gradient norms and weights are equal to the last bit"
    if claimed == "bit-same" and repeatable:
        where = f"losses differ by {found.loss:.1e}" if found.loss else "gradients or weights differ"
        return "rejected", f"it should change no bit, but {where}"
    if not found.finite:
        return "rejected", "its numbers become infinite or NaN where the plain script's stay finite"
    excess = _beyond_rounding(found, floors)
    if excess is None:
        return "within rounding", "no farther from the plain run than a single rounding error in its weights leads"
    if claimed != "reduced":
        return "rejected", excess
    return _reduced(found, floors)


def _beyond_rounding(found: _Differences, floors: Sequence[_Differences]) -> str | None:
    """Why the differences are more than rounding, or None."""
    for index, error in enumerate(found.per_tensor):
        own = max((floor.per_tensor[index] for floor in floors if index < len(floor.per_tensor)), default=0.0)
        if error > max(GRADIENT_ROUNDING_FLOOR, ROUNDING_FACTOR * own):
            return f"a gradient differs by {error:.1e} of its size; rounding explains {own:.1e}"
    envelope = 0.0
    exceeded = []
    for step, difference in enumerate(found.loss_curve):
        envelope = max([envelope, *(floor.loss_curve[step] for floor in floors if step < len(floor.loss_curve))])
        if difference > max(LOSS_ROUNDING_FLOOR, ROUNDING_FACTOR * envelope):
            exceeded.append((step, difference, envelope))
    if len(exceeded) > 0.02 * len(found.loss_curve):
        step, difference, envelope = exceeded[0]
        return f"the loss differs by {difference:.1e} at step {step + 1}; rounding explains {envelope:.1e}"
    own_weight = _largest(floor.weight for floor in floors) or 0.0
    if found.weight is not None and found.weight > max(1e-5, ROUNDING_FACTOR * own_weight):
        return f"the final weights differ by {found.weight:.1e} of their size; rounding explains {own_weight:.1e}"
    return None


def _reduced(found: _Differences, floors: Sequence[_Differences]) -> tuple[str, str]:
    if found.per_tensor and median(list(found.per_tensor)) > REDUCED_GRADIENT_LIMIT:
        error = median(list(found.per_tensor))
        return "rejected", f"a typical gradient differs by {error:.0%} of its size, more than 16-bit products explain"
    if found.drift is None:
        return "rejected", "there are no losses to compare, and the gradients differ by more than rounding"
    own = _largest(abs(floor.drift) for floor in floors if floor.drift is not None) or 0.0
    allowed = max(REDUCED_DRIFT_LIMIT, 3 * own)
    small_against_gain = found.drift_of_gain is not None and abs(found.drift_of_gain) < LOSS_TOLERANCE_OF_GAIN
    suspiciously_low = found.drift < -max(0.1, 10 * own)
    if (found.drift > allowed or suspiciously_low) and not small_against_gain:
        return "rejected", f"its loss is {found.drift:+.1%} off in the later half; the script's own spread is {own:.1%}"
    return "reduced", f"losses of the later half {found.drift:+.2%} off (the script's own spread: {own:.2%})"


def _statistical(found: _Differences, floors: Sequence[_Differences]) -> tuple[str, str]:
    """Two plain runs start differently, so nothing can be said step by step; the level of the losses can."""
    own = _largest(abs(floor.drift) for floor in floors if floor.drift is not None)
    if own is None or found.drift is None:
        return "unproved", "the script differs from run to run, and shows no losses that could be compared"
    if found.drift > max(REDUCED_DRIFT_LIMIT, 3 * own):
        return "rejected", f"its losses lie {found.drift:+.1%} off; plain runs differ by {own:.1%} among themselves"
    return "unproved", (
        f"the script differs from run to run by itself; losses of the later half {found.drift:+.1%} off, "
        f"as plain runs do among themselves ({own:.1%})"
    )


def _notes(repeatable: bool, own: _Differences) -> tuple[str, ...]:
    if repeatable:
        return ()
    if not own.comparable:
        return (
            "the script differs between runs from its first step although every generator was seeded: "
            "it draws from an unseeded generator, from the clock, or depends on the order of files or hashes",
        )
    return ("the script differs between runs after its first steps: a racy worker or an operation without fixed order",)


def _gradient_errors(a: Numerics, b: Numerics) -> tuple[float, ...]:
    """Per parameter: the error of its sampled gradient in the first recorded step, relative to its size.

    A parameter whose gradient is lost in the noise of the others (a bias before a normalisation) does not count.
    """
    if not a.gradient_samples or not b.gradient_samples:
        return ()
    first_a, first_b = a.gradient_samples[0], b.gradient_samples[0]
    if [len(t) for t in first_a] != [len(t) for t in first_b]:
        return ()
    sizes = [_norm(t) / math.sqrt(len(t)) if t else 0.0 for t in first_a]
    largest = max(sizes, default=0.0)
    return tuple(
        _norm([x - y for x, y in zip(u, v, strict=True)]) / _norm(u)
        for u, v, size in zip(first_a, first_b, sizes, strict=True)
        if size > 1e-6 * largest and size > 0
    )


def _drift(pairs: Sequence[tuple[float, float]]) -> tuple[float | None, float | None]:
    """Mean difference over the later half, relative to the mean there, and to what the loss has come down since
    the start."""
    if len(pairs) < 4:
        return None, None
    half = pairs[len(pairs) // 2 :]
    start = [x for x, _ in pairs[: max(1, len(pairs) // 10)]]
    level = sum(abs(x) for x, _ in half) / len(half)
    difference = sum(y - x for x, y in half) / len(half)
    gain = abs(sum(start) / len(start) - sum(x for x, _ in half) / len(half))
    return (difference / level if level else None), (difference / gain if gain else None)


def _relative(a: Sequence[float], b: Sequence[float]) -> float | None:
    size = _norm(a)
    if not size or len(a) != len(b):
        return None
    return _norm([x - y for x, y in zip(a, b, strict=True)]) / size


def _as_finite(a: Sequence[float | None], b: Sequence[float | None]) -> bool:
    """Is all of `b` finite, or was something of `a` not either? A comparison with NaN is never true, so it must be
    asked for."""
    broken = any(value is not None and not math.isfinite(value) for value in b)
    return not broken or any(value is not None and not math.isfinite(value) for value in a)


def _norm(values: Sequence[float]) -> float:
    return math.sqrt(sum(value * value for value in values))


def _equal(a: Sequence[float | None], b: Sequence[float | None]) -> bool:
    return len(a) == len(b) and all(
        x == y or (x is not None and y is not None and x != x and y != y) for x, y in zip(a, b, strict=True)
    )


def _largest(values: Any) -> float | None:
    present = [value for value in values if value is not None]
    return max(present) if present else None
