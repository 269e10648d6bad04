"""Are the numbers still right? Each claim has its own test, which the levers that make it must pass.

    bit-identical
               every loss, every gradient norm, all weights, buffers and RNG states match bit for bit
    rounding   no farther from the plain run, within a factor, than a plain run whose weights were moved by one rounding
               error: the gradient of each parameter and its update from the same state, each loss, and each parameter
               between two check steps (after which both continue from the same state). Where only a few check steps are
               beyond that, plain runs whose weights were moved by several rounding errors count too, scaled down: a
               unit of a ReLU or a pool near its threshold switches sides in some runs and not in others
    reduced    the gradient of each parameter is the plain one plus unbiased noise of 16-bit size (check steps at which
               a 16-bit rounding error in the weights changes a plain run's gradients beyond that are left out); from
               it the optimizer makes the plain update (up to noise where moments are in 8 bits); no step stands out by
               more than such noise causes in a plain run, in its gradients or in the weights that these are taken at;
               and over a whole free run the losses decrease as the plain ones do, within the effect of a 16-bit
               rounding error in the weights

Where two plain runs differ by rounding errors although every generator is seeded (a GPU sums in no fixed order), no
lever can be shown to be bit-identical: all are tested for rounding. Where they differ by more, single steps cannot be
compared: see `numerics.not_alike`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from flatout.statistics import median
from flatout.tuning.numerics import Check, GradientDifference, Numerics, TensorDifference

D = TypeVar("D", GradientDifference, TensorDifference)
K = TypeVar("K")

ROUNDING_FACTOR = 40.0
"""A lever rounds at every operation of every step, the nudge only once: up to this many times its effect is
rounding."""
GRADIENT_ROUNDING_FLOOR = 1e-4
LOSS_ROUNDING_FLOOR = 1e-4
"""A single unit of a ReLU or a pool that switches sides causes this much, at a step where none did in the nudged run.
What a lever does wrong in every step shows in gradients and updates at the check steps, far below that."""
FARTHER = 8
"""Rounding errors by which further plain runs are moved. Their effect counts a FARTHER-th: smooth functions then
explain no more than before, and the units that switch sides within reach of a lever's rounding are found."""
UPDATE_ROUNDING, UPDATE_ULPS = 1e-4, 4.0
"""From equal gradients an optimizer's update agrees to this share of it, or to this many rounding errors of the
weights."""
OWN_GRADIENTS_FACTOR = 3.0
"""Where a script updates its weights itself, or in a closure, the gradients cannot be replaced: their 16-bit noise, and
that of a norm by which they are clipped, carries over to the updates."""
UPDATE_IN_CODES = 0.1
"""The same for parameters whose moments are held in 8 bits: measured at 0.01 to 0.03, and at 0.13 to 0.36 where
gradients vanish in a deep network, which 8 bits cannot represent. A lost update gives 1."""
DRIFT_ROUNDING, DRIFT_ULPS = 1e-3, 8.0
"""The same between check steps; a single lost update is a few per cent of the distance moved."""

LOST_IN_ROUNDING = 0.005
"""A gradient that one fp32 rounding error changes by this much is all cancellation (the bias of keys in attention, or
one before a normalization): 16 bits say nothing about it, and training does not depend on it. Such a bias of a
convolution was measured at 0.01 to 0.4; without cancellation it is near 1e-6."""
REDUCED_GRADIENT_FACTOR, REDUCED_GRADIENT_LEAST, REDUCED_GRADIENT_MOST = 6.0, 0.05, 0.25
"""The whole gradient may be off by this many times the effect of one 16-bit rounding error in the weights (correct
levers were measured at 0.4 to 2.7 times that), within these bounds."""
FP32_TO_16_BITS = 2.0**15
"""How much larger a rounding error of bf16 is than one of fp32."""
UNSTABLE, LEAST_STABLE = 0.1, 3
"""Where one 16-bit rounding error in the weights changes a plain run's gradient by more than the first, correct levers
may change it by more than is accepted: such a check step shows nothing. With fewer others than the second, nothing was
shown. So it is with a hidden state that is carried from step to step at a learning rate that amplifies noise."""
REDUCED_TENSOR_LIMIT = 1.0
"""For a single parameter: beyond this the noise is larger than its gradient."""
REDUCED_BIAS, REDUCED_BIAS_FEW = 0.1, 0.4
"""Noise leaves the projection on the plain gradient at 1; a lever that loses or scales one moves it. The second where
fewer than three check steps cannot show the noise."""
REDUCED_DRIFT_LIMIT = 0.02
"""The losses of the later half may differ by this share of their level, or by three times the effect of a 16-bit
nudge."""
REDUCED_GRADIENT_ANYWHERE = 0.5
"""... and this at any single check step: beyond it, it is the gradient of another batch."""
STEP_STANDS_OUT, STEP_STANDS_OUT_FLOOR = 40.0, 0.02
"""A step whose loss differs by this many times the median, and by this share of the level, is another step."""
STRETCH_STANDS_OUT, STRETCH_STANDS_OUT_FLOOR = 6.0, 0.03
NOISE_FACTOR, NOISE_FACTOR_ANYWHERE = 3.0, 2.0
"""Times the effect of noise in a plain run, on the same step or stretch, or on any: where training amplifies noise,
different noise shows in different steps."""
LEAST_LOSSES = 4
"""Fewest losses that show whether a free run decreases as a plain one does."""
LEAST_STRETCHES = 3
"""With fewer, no value is typical: then only noise counts."""
WAY_FACTOR, WAY_LEAST = 6.0, 0.05
"""Correct levers were measured at 0.3 to 1.7 times the noise of their gradients."""

REPEATED_GRADIENT, REPEATED_LOSS, REPEATED_WAY = 1e-4, 1e-3, 0.05
"""Up to this, two plain runs from the same state differ by rounding alone: the whole gradient, the loss of any step,
the path of the weights from one check step to the next. With more, a candidate measured against it would always
pass."""


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
    """Does a second plain run agree with the first at its check steps, up to rounding errors?"""
    compared = [check for check in again.checks if check.gradients]
    return (
        bool(compared)
        and _incomparable(plain, again) is None
        and all(check.same_generators for check in again.checks)
        and all(_whole(check.gradients) <= REPEATED_GRADIENT for check in compared)
        and all(difference <= REPEATED_LOSS for _, difference in _loss_differences(plain, again))
        and all(share <= REPEATED_WAY for share in _stretches(again).values())
    )


def unlike_structure(plain: Numerics, other: Numerics) -> str | None:
    """What differs before any number is compared: steps, losses per step, parameters, existing gradients."""
    if plain.steps != other.steps:
        return f"it ends after {other.steps} steps, the plain run after {plain.steps}"
    if plain.parameters != other.parameters:
        return f"{len(other.parameters)} parameters are trained, {len(plain.parameters)} in the plain run"
    for step, (mine, theirs) in enumerate(zip(other.losses, plain.losses, strict=True), start=1):
        if len(mine) != len(theirs):
            return f"{len(mine)} backward passes in step {step}, {len(theirs)} in the plain run"
    return next((check.unlike for check in other.checks if check.unlike), None)


def _incomparable(plain: Numerics, other: Numerics, nudged: Numerics | None = None) -> str | None:
    """What differs before numbers are compared. nudged: None: the other run may draw other random numbers."""
    return (
        unlike_structure(plain, other)
        or _not_finite(plain, other)
        or (None if nudged is None else _other_random_numbers(nudged, other))
    )


def not_within_rounding(plain: Numerics, nudged: Numerics, candidate: Numerics) -> str | None:
    """Why the candidate is farther from the plain run than rounding explains, or None."""
    return (
        _incomparable(plain, candidate, nudged)
        or _first(_gradients_beyond_rounding(nudged, candidate))
        or _updates_beyond_rounding(nudged, candidate)
        or _first(_losses_beyond_rounding(plain, nudged, candidate))
        or _first(_drift_beyond_rounding(nudged, candidate))
    )


def is_seldom_beyond_rounding(plain: Numerics, nudged: Numerics, candidate: Numerics) -> bool:
    """Is it, but at no more than half of the steps, and only with gradients and what follows from them?"""
    if _incomparable(plain, candidate, nudged) or _updates_beyond_rounding(nudged, candidate):
        return False
    losses = {step for step, _ in _losses_beyond_rounding(plain, nudged, candidate)}
    found = (*_gradients_beyond_rounding(nudged, candidate), *_drift_beyond_rounding(nudged, candidate))
    checks = {step for step, _ in found}
    if not losses and not checks:
        return False
    return 2 * len(checks) <= len(candidate.checks) and 2 * len(losses) <= candidate.steps


def with_farther(plain: Numerics, nudged: Numerics, farther: Numerics) -> Numerics:
    """The nudged run, with what a plain run moved by FARTHER rounding errors adds to it, scaled down."""
    losses = tuple(
        tuple(_farther(*values) for values in zip(*steps, strict=False))
        for steps in zip(plain.losses, nudged.losses, farther.losses, strict=False)
    )
    more = {check.step: check for check in farther.checks}
    checks = tuple(_with_check(check, more[check.step]) if check.step in more else check for check in nudged.checks)
    return replace(nudged, losses=(*losses, *nudged.losses[len(losses) :]), checks=checks)


def _farther(plain: float, nudged: float, farther: float) -> float:
    scaled = plain + (farther - plain) / FARTHER
    return scaled if abs(scaled - plain) > abs(nudged - plain) else nudged


def _with_check(nudged: Check, farther: Check) -> Check:
    return replace(
        nudged,
        gradients=_larger(nudged.gradients, farther.gradients),
        updates=_larger(nudged.updates, farther.updates),
        drift=_larger(nudged.drift, farther.drift),
    )


def _larger(nudged: tuple[D, ...], farther: tuple[D, ...]) -> tuple[D, ...]:
    errors = {one.name: one.error / FARTHER for one in farther}
    return tuple(replace(one, error=max(one.error, errors.get(one.name, 0.0))) for one in nudged)


def not_reduced(plain: Numerics, nudged: Numerics, checked: Numerics, rough: Numerics | None = None) -> str | None:
    """Why, at the check steps, the run is not the plain run with 16-bit noise, or None.

    rough: a plain run whose weights were moved by a 16-bit rounding error at every check step. Where that changes its
    gradients too much, gradients are only held against how far it changes them.
    """
    return (
        _incomparable(plain, checked, nudged)
        or (rough and _beyond_unstable(rough, checked))
        or _gradients_beyond_16_bits(_at_stable_steps(nudged, rough), _at_stable_steps(checked, rough))
        or _updates_beyond_rounding(nudged, checked, noise_factor=OWN_GRADIENTS_FACTOR)
    )


def differs_only_later(plain: Numerics, nudged: Numerics, checked: Numerics) -> bool:
    """Might the run be the plain one with 16-bit noise as far as the first check step shows?"""
    first = replace(checked, checks=checked.checks[:1])
    early = replace(nudged, checks=nudged.checks[:1])
    return _incomparable(plain, checked) is None and _gradients_beyond_16_bits(early, first) is None


def where_stable(rough: Numerics) -> str:
    """' (at 3 of 6 check steps: ...)', or '' where gradients were compared at all of them."""
    effects = _effects(rough)
    stable = [effect for effect in effects.values() if effect <= UNSTABLE]
    if len(stable) == len(effects):
        return ""
    noise = f"at others such noise alone changes them by up to {max(effects.values()):.0%}"
    return f" (at {len(stable)} of {len(effects)} check steps; {noise})"


def diverges(plain: Numerics, checked: Numerics, *noisy: Numerics, rough: Numerics | None = None) -> str | None:
    """Where such a run diverges from the plain one between check steps, or None.

    The standard is what is typical within it. Some scripts and some steps amplify noise more than others, such as the
    first ones at a high learning rate. `noisy` shows by how much: plain runs with the same noise in their gradients, or
    with gradients that are taken at weights rounded to bf16. So does `rough`, as `not_reduced` has it, for the loss of
    each step alone. Of the weights it says nothing: they were moved in it.
    """
    return (
        _step_stands_out(plain, checked, noisy, rough)
        or _stretch_stands_out(checked, noisy)
        or _way_beyond_gradients(checked, noisy)
    )


def drifts(plain: Numerics, free: Numerics, coarse: Numerics | None = None) -> str | None:
    """Why the candidate, run freely, does not train as the plain run does; `coarse` is a plain run whose weights were
    moved by a 16-bit rounding error at the start, None: the noise explains nothing beyond the fixed limit."""
    if reason := _incomparable(plain, free):
        return reason
    found = late_differences(plain, free)
    if not found:
        return f"there are not {LEAST_LOSSES} losses to compare, and the gradients differ by more than rounding"
    moved = [] if coarse is None else late_differences(plain, coarse)
    if len(moved) != len(found):  # losses that were not finite in it explain nothing
        moved = [[0.0]] * len(found)
    for stream, own in zip(found, moved, strict=True):
        spread = math.sqrt(sum(value**2 for value in own) / len(own))
        mean = sum(stream) / len(stream)
        if abs(mean) > max(REDUCED_DRIFT_LIMIT, 3 * spread):
            explained = "" if coarse is None else f"; 16-bit noise in the weights explains {spread:.1%}"
            return f"its loss is {mean:+.1%} off in the later half{explained}"
    return None


def may_drift_by_noise(plain: Numerics, free: Numerics) -> bool:
    """Could a plain run with 16-bit noise in its first weights explain how far the losses of a free run are off?"""
    return _incomparable(plain, free) is None and bool(late_differences(plain, free))


def late_differences(plain: Numerics, other: Numerics) -> list[list[float]]:
    """For each loss of a step: difference of its mean in eight stretches of the later half, relative to its level."""
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
        scale = scale or sum(abs(x) for x, _ in pairs) / len(pairs)  # a hinge loss may become 0
        differences = [sum(y - x for x, y in block) / len(block) for block in blocks]
        found.append([one / scale if scale else math.inf if one else 0.0 for one in differences])
    return found


def largest_loss_difference(plain: Numerics, other: Numerics) -> float | None:
    return max((value for _, value in _loss_differences(plain, other)), default=None)


def typical_gradient_difference(run: Numerics) -> float:
    """Of the whole gradient, relative to its size: the median over the check steps; 0 where there is none."""
    return median([_whole(check.gradients) for check in run.checks if check.gradients] or [0.0])


def largest_gradient_difference(run: Numerics) -> float | None:
    """Over all parameters with a gradient that is not 0, and all check steps; relative to its size."""
    return max((g.relative for check in run.checks for g in check.gradients if g.size), default=None)


# rounding


def _not_finite(plain: Numerics, candidate: Numerics) -> str | None:
    """For two of like structure. One number of the plain run that is not finite, as under a loss scale that is too
    large at first, excuses no other."""
    both = zip(plain.are_finite(), candidate.are_finite(), strict=True)
    if any(finite and not as_well for finite, as_well in both):
        return "its numbers become infinite or NaN where the plain script's stay finite"
    return None


def _other_random_numbers(nudged: Numerics, candidate: Numerics) -> str | None:
    own = {check.step for check in nudged.checks if not check.same_generators}
    for check in candidate.checks:
        if not check.same_generators and check.step not in own:
            return f"it has drawn other random numbers by step {check.step + 1}"
    return None


def _first(found: Iterable[tuple[int, str]]) -> str | None:
    return next((reason for _, reason in found), None)


def _gradients_beyond_rounding(nudged: Numerics, candidate: Numerics) -> Iterator[tuple[int, str]]:
    """(step, what is beyond)"""
    for check, floor in _beside(candidate, nudged):
        own = {g.name: g.relative for g in floor.gradients} if floor else {}
        for gradient in check.gradients:
            explained = own.get(gradient.name, 0.0)
            if gradient.relative > max(GRADIENT_ROUNDING_FLOOR, ROUNDING_FACTOR * explained):
                size = f"differs by {gradient.relative:.1e} of its size at step {check.step + 1}"
                yield check.step, f"the gradient of {gradient.name} {size}; rounding explains {explained:.1e}"


def _updates_beyond_rounding(nudged: Numerics, candidate: Numerics, *, noise_factor: float = 0.0) -> str | None:
    """Where the optimizer got its own gradients, these explain differences as large as in the nudged run, and as
    `noise_factor` times their own error."""
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
                return f"{gradients}the optimizer's update of {update.name} is off by {share:.1e} of its size"
    return None


def _losses_beyond_rounding(plain: Numerics, nudged: Numerics, candidate: Numerics) -> Iterator[tuple[int, str]]:
    starts = {check.step for check in candidate.checks} & {check.step for check in nudged.checks}
    floor = dict(_loss_differences(plain, nudged))
    explained = 0.0
    for step, difference in _loss_differences(plain, candidate):
        if step in starts:
            explained = 0.0
        explained = max(explained, floor.get(step, 0.0))
        if difference > max(LOSS_ROUNDING_FLOOR, ROUNDING_FACTOR * explained):
            yield step, f"the loss differs by {difference:.1e} at step {step + 1}; rounding explains {explained:.1e}"


def _drift_beyond_rounding(nudged: Numerics, candidate: Numerics) -> Iterator[tuple[int, str]]:
    shares = ((one.name, one.error / one.moved) for check in nudged.checks[1:] for one in check.drift if one.moved)
    usual = _largest([shares])
    for check, floor in _beside(candidate, nudged):
        own = _errors(floor.drift) if floor else {}
        if check is candidate.checks[0]:  # a lever on from the start has made steps by now, the nudge none
            own = {one.name: max(own.get(one.name, 0.0), usual.get(one.name, 0.0) * one.moved) for one in check.drift}
        for drift in check.drift:
            limit = max(DRIFT_ULPS * drift.rounding, DRIFT_ROUNDING * drift.moved)
            if drift.error > max(limit, ROUNDING_FACTOR * own.get(drift.name, 0.0)):
                share = drift.error / drift.moved if drift.moved else math.inf
                yield check.step, f"{drift.name} is off by {share:.1e} of its change at step {check.step + 1}"


# reduced


def _effects(rough: Numerics) -> dict[int, float]:
    """Check step -> by what share the whole gradient of such a plain run differs from the plain one."""
    return {check.step: _whole(check.gradients) for check in rough.checks if check.gradients}


def _at_stable_steps(run: Numerics, rough: Numerics | None) -> Numerics:
    if rough is None:
        return run
    effects = _effects(rough)
    return replace(run, checks=tuple(one for one in run.checks if effects.get(one.step, math.inf) <= UNSTABLE))


def _beyond_unstable(rough: Numerics, candidate: Numerics) -> str | None:
    """Too few stable steps, or a gradient farther off than in the plain run with noise, wherever that is unstable."""
    effects = _effects(rough)
    unstable = {step: effect for step, effect in effects.items() if not effect <= UNSTABLE}
    if len(effects) - len(unstable) < LEAST_STABLE:
        typical = median([*unstable.values()] or [0.0])
        noise = f"16-bit noise in the weights alone changes it by {typical:.0%} at {len(unstable)} of {len(effects)}"
        return f"the whole gradient can be compared at fewer than {LEAST_STABLE} check steps: {noise}"
    anywhere = max(unstable.values(), default=0.0)
    for check in candidate.checks:
        if check.step in unstable:
            explained = max(NOISE_FACTOR * unstable[check.step], NOISE_FACTOR_ANYWHERE * anywhere)
            if not (whole := _whole(check.gradients)) <= explained:
                noise = f"16-bit noise in the weights alone changes it by {anywhere:.0%} at most"
                return f"the whole gradient differs by {whole:.0%} of its size at step {check.step + 1}; {noise}"
    return None


def _gradients_beyond_16_bits(nudged: Numerics, candidate: Numerics) -> str | None:
    compared = [check for check in candidate.checks if check.gradients]
    if not compared:
        return "no gradient could be compared"
    floors = {name: median([g.relative for g in found]) for name, found in _by_name(nudged).items()}
    lost = {name for name, own in floors.items() if own > LOST_IN_ROUNDING}
    if all(gradient.name in lost for check in compared for gradient in check.gradients):
        return "one rounding error decides all of its gradients: 16 bits say nothing about them"
    wholes = [_whole([g for g in check.gradients if g.name not in lost]) for check in compared]
    fine = [_whole([g for g in check.gradients if g.name not in lost]) for check in nudged.checks if check.gradients]
    explained = FP32_TO_16_BITS * median(fine or [0.0])
    allowed = min(max(REDUCED_GRADIENT_FACTOR * explained, REDUCED_GRADIENT_LEAST), REDUCED_GRADIENT_MOST)
    if median(wholes) > allowed:
        beyond = (
            f"16 bits explain {explained:.1%}" if explained < allowed else f"more than {allowed:.0%} is not accepted"
        )
        return f"the whole gradient differs by {median(wholes):.1%} of its size; {beyond}"
    for check, whole in zip(compared, wholes, strict=True):
        if whole > REDUCED_GRADIENT_ANYWHERE:
            return f"the whole gradient differs by {whole:.0%} of its size at step {check.step + 1}"
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
        return f"differs by {error:.0%} of its size: 16 bits cannot represent it"
    scales = [gradient.scale for gradient in present]
    mean = sum(scales) / len(scales)
    allowed = REDUCED_BIAS_FEW
    if len(scales) >= 3:
        variance = sum((scale - mean) ** 2 for scale in scales) / (len(scales) - 1)
        allowed = REDUCED_BIAS + 3 * math.sqrt(variance / len(scales))
    if abs(mean - 1) > allowed:
        return f"is {mean:.2f} times the plain one (±{allowed:.2f} is allowed)"
    return None


def _step_stands_out(
    plain: Numerics, checked: Numerics, noisy: Sequence[Numerics], rough: Numerics | None
) -> str | None:
    """Noise is similar in all steps; another batch, or a lost step, stands out. Steps count from the last check."""
    differences = _loss_differences(plain, checked)
    if len(differences) < 4:
        return None
    usual = median([value for _, value in differences])
    starts, own = {check.step for check in checked.checks}, _largest(_loss_differences(plain, one) for one in noisy)
    here = own if rough is None else _largest([own.items(), _loss_differences(plain, rough)])
    anywhere, near = max(own.values(), default=0.0), 0.0
    for step, value in differences:
        near = max(0.0 if step in starts else near, here.get(step, 0.0))
        explained = max(NOISE_FACTOR * near, NOISE_FACTOR_ANYWHERE * anywhere)
        if value > max(STEP_STANDS_OUT_FLOOR, STEP_STANDS_OUT * usual, explained):
            noise = f"; noise in a plain run causes {anywhere:.1%} at most" if noisy else ""
            return f"the loss of step {step + 1} differs by {value:.0%}, those of other steps by {usual:.1%}{noise}"
    return None


def _stretch_stands_out(checked: Numerics, noisy: Sequence[Numerics]) -> str | None:
    """The same for the change of the weights from one check step to the next."""
    shares, own = _stretches(checked), _largest(_stretches(one).items() for one in noisy)
    if len(shares) < LEAST_STRETCHES:
        return None
    anywhere = NOISE_FACTOR_ANYWHERE * max(own.values(), default=0.0)
    for step, share in shares.items():
        usual = median([other for one, other in shares.items() if one != step])
        explained = max(NOISE_FACTOR * own.get(step, 0.0), anywhere)
        if share > max(STRETCH_STANDS_OUT_FLOOR, STRETCH_STANDS_OUT * usual, explained):
            return f"before step {step + 1} the weights deviate by {share:.0%} of their change, usually {usual:.1%}"
    return None


def _way_beyond_gradients(checked: Numerics, noisy: Sequence[Numerics]) -> str | None:
    """Noise in the gradients makes the weights deviate by about the same share; lost steps, by more."""
    shares = list(_stretches(checked).values())
    if not shares or not any(check.gradients for check in checked.checks):
        return None
    share, noise = median(shares), typical_gradient_difference(checked)
    explained = max((median(list(_stretches(one).values()) or [0.0]) for one in noisy), default=0.0)
    if share > max(WAY_LEAST, WAY_FACTOR * noise, NOISE_FACTOR * explained):
        return f"the weights deviate by {share:.0%} of their change; the noise of the gradients is {noise:.1%}"
    return None


def _largest(runs: Iterable[Iterable[tuple[K, float]]]) -> dict[K, float]:
    """Step, or name -> the largest of its values in any of the runs."""
    found: dict[K, float] = {}
    for key, value in itertools.chain.from_iterable(runs):
        found[key] = max(found.get(key, 0.0), value)
    return found


def _stretches(checked: Numerics) -> dict[int, float]:
    """Check step -> deviation of the weights since the check before, as a share of the plain run's change; of the
    buffers as a share of their size, where that is more. Not where that was a single step, made from the plain run's
    gradients, or far fewer steps than between other check steps."""
    shares, weights = {}, set(checked.parameters)
    longest = max((check.step - before.step for before, check in itertools.pairwise(checked.checks)), default=0)
    for before, check in itertools.pairwise(checked.checks):
        if (before.replaced and check.step == before.step + 1) or 2 * (check.step - before.step) < longest:
            continue
        kinds = ([one for one in check.drift if (one.name in weights) is wanted] for wanted in (True, False))
        sizes = ((math.hypot(*(one.error for one in kind)), math.hypot(*(one.moved for one in kind))) for kind in kinds)
        found = [error / moved for error, moved in sizes if moved]
        if found:
            shares[check.step] = max(found)
    return shares


# parts


def _streams(plain: Numerics, other: Numerics) -> list[list[tuple[float, float]]]:
    """Pairs (plain, other) of each loss of a step, where every step has equally many; else of their means."""
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
    """(step, largest difference of its losses, relative to the median of each) for every step that has some."""
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
