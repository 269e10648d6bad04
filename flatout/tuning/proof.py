"""Are the numbers still right? Each claim has its own test, and each must be passed by the levers that make it.

    bit-identical
               every loss, every gradient norm, all weights, buffers and RNG states match bit for bit
    rounding   no farther from the plain run than a plain run whose weights were moved by one rounding error, within a
               factor: the gradient of each parameter and each update of it from the same state, each loss and each
               parameter between two check steps (after which both go on from the same state again)
    reduced    the gradient of each parameter is the plain one plus unbiased noise of 16-bit size; the optimizer makes
               the plain update of it (with moments in 8 bits but for their noise); no step stands out by more than
               training makes of as much noise in the gradients; and over the whole run, left to itself, the losses
               come down as the plain ones do, within what weights moved by a 16-bit rounding error change

Where two plain runs differ by rounding errors although every generator is seeded (a GPU adds in no fixed order), no
lever can be shown to be bit-identical: within rounding is asked of all. Where they differ by more, no step can be
compared with any other: see `levels`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

from flatout.statistics import median
from flatout.tuning.numerics import Check, GradientDifference, Numerics, TensorDifference

ROUNDING_FACTOR = 40.0
"""A lever rounds at every operation of every step, the nudge only once: so many times its effect is still rounding."""
GRADIENT_ROUNDING_FLOOR = 1e-4
LOSS_ROUNDING_FLOOR = 1e-4
"""A single unit of a ReLU or a pool that falls to the other side makes so much, at a step at which the nudged run had
none. What a lever does wrong in every step is found by gradients and updates, at the check steps, far below that."""
UPDATE_ROUNDING, UPDATE_ULPS = 1e-4, 4.0
"""From equal gradients an optimizer's update is equal to so many parts of it, or rounding errors of the weights."""
OWN_GRADIENTS_FACTOR = 3.0
"""Where a script updates its weights itself, or in a closure, the gradients cannot be replaced: the noise of 16 bits in
them, with that of the norm by which they may be clipped, goes on into the updates."""
UPDATE_IN_CODES = 0.1
"""The same where the moments are held in 8 bits, of the parameters of which they are: seen at 0.01 to 0.03, and at 0.13
to 0.36 where gradients vanish in a deep network, which 8 bits do not hold. A lost update makes 1."""
DRIFT_ROUNDING, DRIFT_ULPS = 1e-3, 8.0
"""The same between check steps; a single update that is lost is some per cent of the way."""

LOST_IN_ROUNDING = 0.005
"""A gradient that one fp32 rounding error changes by so much is all cancellation (the bias of keys in attention, or one
before a normalisation): 16 bits can say nothing about it, and training does not depend on it. Such a bias of a
convolution was seen at 0.01 to 0.4; what is no cancellation lies near 1e-6."""
REDUCED_GRADIENT_FACTOR, REDUCED_GRADIENT_LEAST, REDUCED_GRADIENT_MOST = 6.0, 0.05, 0.25
"""The gradient as a whole may be off by so many times what one rounding error of 16 bits in the weights makes (right
levers were seen at 0.4 to 2.7 times that), within these bounds."""
FP32_TO_16_BITS = 2.0**15
"""How much larger a rounding error of bf16 is than one of fp32."""
REDUCED_TENSOR_LIMIT = 1.0
"""Of a single parameter: beyond this the noise is larger than its gradient."""
REDUCED_BIAS, REDUCED_BIAS_FEW = 0.1, 0.4
"""Noise leaves the plain gradient's share at 1; a lever that loses or scales one moves it. The second where fewer than
three check steps do not tell the noise."""
REDUCED_DRIFT_LIMIT = 0.02
"""The losses of the later half may differ by so much of their level, or by three times what a nudge of 16 bits does."""
REDUCED_GRADIENT_ANYWHERE = 0.5
"""... and this at any single check step: there, it is the gradient of another batch."""
STEP_STANDS_OUT, STEP_STANDS_OUT_FLOOR = 40.0, 0.02
"""A step whose loss differs by so many times the median, and by this share of the level, is another step."""
STRETCH_STANDS_OUT, STRETCH_STANDS_OUT_FLOOR = 6.0, 0.03
NOISE_FACTOR, NOISE_FACTOR_ANYWHERE = 3.0, 2.0
"""Times what as much noise in the gradients of a plain run makes of the same step or stretch, or of any: where training
amplifies noise, other noise shows in other steps."""
LEAST_LOSSES = 4
"""Steps whose losses say whether a run left to itself comes down as a plain one does."""
LEAST_STRETCHES = 3
"""Of fewer, nobody can say which is usual: then the noise of the gradients is the only measure."""
WAY_FACTOR, WAY_LEAST = 6.0, 0.05
"""Right levers were seen at 0.3 to 1.7 times the noise of their gradients."""

REPEATED_GRADIENT, REPEATED_LOSS, REPEATED_WAY = 1e-4, 1e-3, 0.05
"""Up to this two plain runs from the same state differ by rounding alone: the gradient as a whole, the loss of any
step, the way of the weights from one check step to the next. Where they differ by more, a candidate measured against
that would pass whatever it does."""


def not_bit_identical(plain: Numerics, other: Numerics) -> str | None:
    """The first difference, or None."""
    if structure := unlike_structure(plain, other):
        return structure
    for step, (mine, theirs) in enumerate(zip(other.losses, plain.losses, strict=True), start=1):
        if not _equal(mine, theirs):
            return f"the losses differ from step {step} on"
    for step, (norm, expected) in enumerate(zip(other.norms, plain.norms, strict=True), start=1):
        if not _equal((norm,), (expected,)):
            return f"the gradients differ from step {step} on"
    for what in ("weight", "buffer"):
        if getattr(plain, f"{what}_digest") != getattr(other, f"{what}_digest"):
            return f"the final {what}s differ"
    if plain.generator_digest != other.generator_digest:
        return "it draws other random numbers"
    return None


def repeats_to_rounding(plain: Numerics, again: Numerics) -> bool:
    """Is a plain run beside the plain one's check steps that run but for rounding errors?"""
    compared = [check for check in again.checks if check.gradients]
    return (
        bool(compared)
        and unlike_structure(plain, again) is None
        and _not_finite(plain, again) is None
        and all(check.same_generators for check in again.checks)
        and all(_whole(check.gradients) <= REPEATED_GRADIENT for check in compared)
        and all(difference <= REPEATED_LOSS for _, difference in _loss_differences(plain, again))
        and all(share <= REPEATED_WAY for share in _stretches(again).values())
    )


def unlike_structure(plain: Numerics, other: Numerics) -> str | None:
    """What differs before any number is compared: steps, losses of a step, parameters, gradients that are there."""
    if plain.steps != other.steps:
        return f"it ends after {other.steps} steps, the plain run after {plain.steps}"
    if plain.parameters != other.parameters:
        return f"{len(other.parameters)} parameters are trained; plainly {len(plain.parameters)}"
    for step, (mine, theirs) in enumerate(zip(other.losses, plain.losses, strict=True), start=1):
        if len(mine) != len(theirs):
            return f"{len(mine)} backward passes in step {step}; plainly {len(theirs)}"
    return next((check.unlike for check in other.checks if check.unlike), None)


def not_within_rounding(plain: Numerics, nudged: Numerics, candidate: Numerics) -> str | None:
    """Why the candidate is farther from the plain run than rounding explains, or None."""
    return (
        unlike_structure(plain, candidate)
        or _not_finite(plain, candidate)
        or _other_random_numbers(nudged, candidate)
        or _gradients_beyond_rounding(nudged, candidate)
        or _updates_beyond_rounding(nudged, candidate)
        or _losses_beyond_rounding(plain, nudged, candidate)
        or _drift_beyond_rounding(nudged, candidate)
    )


def not_reduced(plain: Numerics, nudged: Numerics, checked: Numerics) -> str | None:
    """Why a run beside the plain one's check steps is not that run with 16-bit noise, or None."""
    return (
        unlike_structure(plain, checked)
        or _not_finite(plain, checked)
        or _other_random_numbers(nudged, checked)
        or _gradients_beyond_16_bits(nudged, checked)
        or _updates_beyond_rounding(nudged, checked, noise_factor=OWN_GRADIENTS_FACTOR)
    )


def goes_astray(plain: Numerics, checked: Numerics, noisy: Numerics | None = None) -> str | None:
    """Where such a run does not keep beside the plain one from one check step to the next, or None.

    What is usual within it is the measure. Training amplifies noise in some scripts, and in some steps, more than in
    others, as in the first ones at a high learning rate. `noisy` says by how much: a plain run with as much noise in
    its gradients.
    """
    return (
        _step_stands_out(plain, checked, noisy)
        or _stretch_stands_out(checked, noisy)
        or _way_beyond_gradients(checked, noisy)
    )


def drifts(plain: Numerics, coarse: Numerics, free: Numerics) -> str | None:
    """Why the candidate, left to itself, does not train as the plain run does; `coarse` is a plain run whose weights
    were moved by a 16-bit rounding error at the start."""
    if reason := unlike_structure(plain, free) or _not_finite(plain, free):
        return reason
    found = late_differences(plain, free)
    if not found:
        return f"there are no losses of {LEAST_LOSSES} steps to compare, and the gradients differ by more than rounding"
    for stream, own in zip(found, late_differences(plain, coarse) or [[0.0]] * len(found), strict=True):
        spread = math.sqrt(sum(value**2 for value in own) / len(own))
        mean = sum(stream) / len(stream)
        if abs(mean) > max(REDUCED_DRIFT_LIMIT, 3 * spread):
            return f"its loss is {mean:+.1%} off in the later half; 16-bit noise in the weights explains {spread:.1%}"
    return None


def late_differences(plain: Numerics, other: Numerics) -> list[list[float]]:
    """For each loss of a step: differences of its mean in eight stretches of the later half, relative to its level."""
    streams = _streams(plain, other)
    found = []
    for pairs in streams:
        half = pairs[len(pairs) // 2 :]
        if len(pairs) < LEAST_LOSSES:
            continue
        level = sum(abs(x) for x, _ in half) / len(half)
        centre = sum(x for x, _ in half) / len(half)
        scale = max(level, math.sqrt(sum((x - centre) ** 2 for x, _ in half) / len(half)))
        size = max(1, len(half) // 8)
        blocks = [half[i : i + size] for i in range(0, len(half), size)]
        found.append([sum(y - x for x, y in block) / len(block) / scale if scale else 0.0 for block in blocks])
    return found


def largest_loss_difference(plain: Numerics, other: Numerics) -> float | None:
    return max((value for _, value in _loss_differences(plain, other)), default=None)


def typical_gradient_difference(run: Numerics) -> float:
    """Of the gradient as a whole, relative to its size: the median of the check steps; 0 where there is none."""
    return median([_whole(check.gradients) for check in run.checks if check.gradients] or [0.0])


def largest_gradient_difference(run: Numerics) -> float | None:
    """Of all parameters whose gradient is not lost in rounding, at all check steps; relative to its size."""
    return max((g.relative for check in run.checks for g in check.gradients if g.size), default=None)


# rounding


def _not_finite(plain: Numerics, candidate: Numerics) -> str | None:
    if plain.stays_finite() and not candidate.stays_finite():
        return "its numbers become infinite or NaN where the plain script's stay finite"
    return None


def _other_random_numbers(nudged: Numerics, candidate: Numerics) -> str | None:
    own = {check.step for check in nudged.checks if not check.same_generators}
    for check in candidate.checks:
        if not check.same_generators and check.step not in own:
            return f"it has drawn other random numbers by step {check.step + 1}"
    return None


def _gradients_beyond_rounding(nudged: Numerics, candidate: Numerics) -> str | None:
    for check, floor in _beside(candidate, nudged):
        own = {g.name: g.relative for g in floor.gradients} if floor else {}
        for gradient in check.gradients:
            explained = own.get(gradient.name, 0.0)
            if gradient.relative > max(GRADIENT_ROUNDING_FLOOR, ROUNDING_FACTOR * explained):
                size = f"differs by {gradient.relative:.1e} of its size at step {check.step + 1}"
                return f"the gradient of {gradient.name} {size}; rounding explains {explained:.1e}"
    return None


def _updates_beyond_rounding(nudged: Numerics, candidate: Numerics, *, noise_factor: float = 0.0) -> str | None:
    """Where the optimizer got its own gradients, these explain differences as far as they do in the nudged run, and
    `noise_factor` times as far as they are off themselves."""
    for check, floor in _beside(candidate, nudged):
        own = {} if floor is None or check.replaced else _errors(floor.updates)
        noisy = check.gradients if noise_factor and not check.replaced else ()
        noise = {gradient.name: noise_factor * gradient.relative for gradient in noisy}
        whole = noise_factor * _whole(noisy)
        for update in check.updates:
            codes = UPDATE_IN_CODES if noise_factor and update.name in candidate.in_codes else 0.0
            allowed = max(UPDATE_ROUNDING, codes, whole, noise.get(update.name, 0.0))
            limit = max(allowed * update.moved, UPDATE_ULPS * update.rounding)
            if update.error > max(limit, ROUNDING_FACTOR * own.get(update.name, 0.0)) and (check.replaced or own):
                share = update.error / update.moved if update.moved else math.inf
                gradients = "from the same gradients " if check.replaced else ""
                return f"{gradients}the optimizer's step moves {update.name} {share:.1e} of its way elsewhere"
    return None


def _losses_beyond_rounding(plain: Numerics, nudged: Numerics, candidate: Numerics) -> str | None:
    starts = {check.step for check in candidate.checks} & {check.step for check in nudged.checks}
    floor = dict(_loss_differences(plain, nudged))
    explained = 0.0
    for step, difference in _loss_differences(plain, candidate):
        if step in starts:
            explained = 0.0
        explained = max(explained, floor.get(step, 0.0))
        if difference > max(LOSS_ROUNDING_FLOOR, ROUNDING_FACTOR * explained):
            return f"the loss differs by {difference:.1e} at step {step + 1}; rounding explains {explained:.1e}"
    return None


def _drift_beyond_rounding(nudged: Numerics, candidate: Numerics) -> str | None:
    usual = _largest_shares(nudged)
    for check, floor in _beside(candidate, nudged):
        own = _errors(floor.drift) if floor else {}
        if check is candidate.checks[0]:  # a lever that holds from the start has made steps by now, the nudge none
            own = {one.name: max(own.get(one.name, 0.0), usual.get(one.name, 0.0) * one.moved) for one in check.drift}
        for drift in check.drift:
            limit = max(DRIFT_ULPS * drift.rounding, DRIFT_ROUNDING * drift.moved)
            if drift.error > max(limit, ROUNDING_FACTOR * own.get(drift.name, 0.0)):
                share = drift.error / drift.moved if drift.moved else math.inf
                return f"{drift.name} is {share:.1e} of its way off at step {check.step + 1}"
    return None


def _largest_shares(nudged: Numerics) -> dict[str, float]:
    """How far off its way each tensor came between two check steps, at the most, as a share of it."""
    found: dict[str, float] = {}
    for check in nudged.checks[1:]:
        for drift in check.drift:
            if drift.moved:
                found[drift.name] = max(found.get(drift.name, 0.0), drift.error / drift.moved)
    return found


# reduced


def _gradients_beyond_16_bits(nudged: Numerics, candidate: Numerics) -> str | None:
    compared = [check for check in candidate.checks if check.gradients]
    if not compared:
        return "no gradient could be compared"
    floors = {name: median([g.relative for g in found]) for name, found in _by_name(nudged).items()}
    lost = {name for name, own in floors.items() if own > LOST_IN_ROUNDING}
    wholes = [_whole([g for g in check.gradients if g.name not in lost]) for check in compared]
    fine = [_whole([g for g in check.gradients if g.name not in lost]) for check in nudged.checks if check.gradients]
    explained = FP32_TO_16_BITS * median(fine or [0.0])
    allowed = min(max(REDUCED_GRADIENT_FACTOR * explained, REDUCED_GRADIENT_LEAST), REDUCED_GRADIENT_MOST)
    if median(wholes) > allowed:
        return f"the gradient as a whole differs by {median(wholes):.1%} of its size; 16 bits explain {explained:.1%}"
    for check, whole in zip(compared, wholes, strict=True):
        if whole > REDUCED_GRADIENT_ANYWHERE:
            return f"the gradient as a whole differs by {whole:.0%} of its size at step {check.step + 1}"
    for name, found in _by_name(candidate).items():
        present = [gradient for gradient in found if gradient.size]
        if present and all(gradient.product == 0 for gradient in present):
            return f"the gradient of {name} is lost"
        if present and name not in lost and (reason := _tensor_beyond_16_bits(present)):
            return f"the gradient of {name} {reason}"
    return None


def _tensor_beyond_16_bits(present: Sequence[GradientDifference]) -> str | None:
    error = median([gradient.relative for gradient in present])
    if error > REDUCED_TENSOR_LIMIT:
        return f"differs by {error:.0%} of its size: 16 bits do not hold it"
    scales = [gradient.scale for gradient in present]
    mean = sum(scales) / len(scales)
    allowed = REDUCED_BIAS_FEW
    if len(scales) >= 3:
        variance = sum((scale - mean) ** 2 for scale in scales) / (len(scales) - 1)
        allowed = REDUCED_BIAS + 3 * math.sqrt(variance / len(scales))
    if abs(mean - 1) > allowed:
        return f"is {mean:.2f} times the plain one (±{allowed:.2f} is allowed)"
    return None


def _step_stands_out(plain: Numerics, checked: Numerics, noisy: Numerics | None) -> str | None:
    """Noise is about alike in all steps; another batch, or a lost step, is not. Steps count from the last check."""
    differences = _loss_differences(plain, checked)
    if len(differences) < 4:
        return None
    usual = median([value for _, value in differences])
    starts, own = {check.step for check in checked.checks}, dict(_loss_differences(plain, noisy) if noisy else ())
    anywhere, near = max(own.values(), default=0.0), 0.0
    for step, value in differences:
        near = max(0.0 if step in starts else near, own.get(step, 0.0))
        explained = max(NOISE_FACTOR * near, NOISE_FACTOR_ANYWHERE * anywhere)
        if value > max(STEP_STANDS_OUT_FLOOR, STEP_STANDS_OUT * usual, explained):
            noise = f"; as much noise in the gradients of a plain run makes {anywhere:.1%} at the most" if noisy else ""
            return f"the loss of step {step + 1} differs by {value:.0%}, those of other steps by {usual:.1%}{noise}"
    return None


def _stretch_stands_out(checked: Numerics, noisy: Numerics | None) -> str | None:
    """The same of the way that the weights went from one check step to the next."""
    shares, own = _stretches(checked), _stretches(noisy) if noisy else {}
    if len(shares) < LEAST_STRETCHES:
        return None
    anywhere = NOISE_FACTOR_ANYWHERE * max(own.values(), default=0.0)
    for step, share in shares.items():
        usual = median([other for one, other in shares.items() if one != step])
        explained = max(NOISE_FACTOR * own.get(step, 0.0), anywhere)
        if share > max(STRETCH_STANDS_OUT_FLOOR, STRETCH_STANDS_OUT * usual, explained):
            return f"before step {step + 1} the weights went {share:.0%} of their way elsewhere, usually {usual:.1%}"
    return None


def _way_beyond_gradients(checked: Numerics, noisy: Numerics | None) -> str | None:
    """Noise of the gradients takes the weights about as far off their way as it is large; lost steps, farther."""
    shares = list(_stretches(checked).values())
    if not shares or not any(check.gradients for check in checked.checks):
        return None
    share, noise = median(shares), typical_gradient_difference(checked)
    explained = median(list(_stretches(noisy).values()) or [0.0]) if noisy else 0.0
    if share > max(WAY_LEAST, WAY_FACTOR * noise, NOISE_FACTOR * explained):
        return f"the weights go {share:.0%} of their way elsewhere; the noise of the gradients is {noise:.1%}"
    return None


def _stretches(checked: Numerics) -> dict[int, float]:
    """Check step -> how far the weights came from the plain run's way since the check before, as a share of it. Not
    where that was one step, made from the plain run's gradients."""
    shares = {}
    for before, check in itertools.pairwise(checked.checks):
        if before.replaced and check.step == before.step + 1:
            continue
        moved = math.sqrt(sum(drift.moved**2 for drift in check.drift))
        if moved:
            shares[check.step] = math.sqrt(sum(drift.error**2 for drift in check.drift)) / moved
    return shares


# parts


def _streams(plain: Numerics, other: Numerics) -> list[list[tuple[float, float]]]:
    """Pairs (plain, other) of each loss of a step, where every step has as many; else of their means."""
    counts = {len(step) for step in plain.losses}
    if len(counts) == 1 and plain.losses and plain.losses[0]:
        columns = range(counts.pop())
        pairs = [[(a[i], b[i]) for a, b in zip(plain.losses, other.losses, strict=False)] for i in columns]
    else:
        means = zip(plain.mean_losses(), other.mean_losses(), strict=False)
        pairs = [[(a, b) for a, b in means if a is not None and b is not None]]
    finite = [[(a, b) for a, b in stream if math.isfinite(a) and math.isfinite(b)] for stream in pairs]
    return [stream for stream in finite if stream]


def _loss_differences(plain: Numerics, other: Numerics) -> list[tuple[int, float]]:
    """(step, the largest difference of its losses, relative to the median of each) of every step that has some."""
    counts = itertools.zip_longest(*plain.losses)
    scales = [median([abs(x) for x in column if x is not None and math.isfinite(x)] or [0.0]) for column in counts]
    found = []
    for step, (a, b) in enumerate(zip(plain.losses, other.losses, strict=False)):
        relative = [
            abs(x - y) / scale if scale else float(x != y)
            for x, y, scale in zip(a, b, scales, strict=False)
            if math.isfinite(x) and math.isfinite(y)
        ]
        if relative:
            found.append((step, max(relative)))
    return found


def _beside(candidate: Numerics, nudged: Numerics) -> list[tuple[Check, Check | None]]:
    floors = {check.step: check for check in nudged.checks}
    return [(check, floors.get(check.step)) for check in candidate.checks]


def _errors(differences: Iterable[TensorDifference]) -> dict[str, float]:
    return {difference.name: difference.error for difference in differences}


def _by_name(run: Numerics) -> dict[str, list[GradientDifference]]:
    found: dict[str, list[GradientDifference]] = {}
    for check in run.checks:
        for gradient in check.gradients:
            found.setdefault(gradient.name, []).append(gradient)
    return found


def _whole(gradients: Sequence[GradientDifference]) -> float:
    size = math.sqrt(sum(g.size**2 for g in gradients))
    error = math.sqrt(sum(g.error**2 for g in gradients))
    return error / size if size else (math.inf if error else 0.0)


def _equal(a: Sequence[float | None], b: Sequence[float | None]) -> bool:
    return len(a) == len(b) and all(
        x == y or (x is not None and y is not None and x != x and y != y) for x, y in zip(a, b, strict=True)
    )
