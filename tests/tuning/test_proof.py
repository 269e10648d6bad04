"""The judge of numbers, given recorded runs: what each claim lets pass, and what it does not."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from flatout.tuning import numerics
from flatout.tuning import proof as judge
from flatout.tuning.numerics import Check, GradientDifference, Numerics, TensorDifference

STEPS = 40
NAMES = ("0.weight", "0.bias", "2.weight")


def check(step: int, *, gradient: float = 0.0, update: float = 0.0, drift: float = 0.0) -> Check:
    """Relative errors, at right angles to the gradients."""
    return Check(
        step=step,
        same_generators=True,
        unlike="",
        replaced=True,
        drift=tuple(TensorDifference(name=n, error=drift, moved=1.0, rounding=1e-7) for n in NAMES),
        gradients=tuple(GradientDifference(name=n, error=gradient * 2, size=2.0, product=4.0) for n in NAMES),
        updates=tuple(TensorDifference(name=n, error=update * 0.1, moved=0.1, rounding=1e-7) for n in NAMES),
    )


def run(
    *,
    seed: int = 0,
    noise: float = 0.0,
    level: float = 1.0,
    gradient: float = 0.0,
    drift: float = 0.0,
    low: float = 1.0,
) -> Numerics:
    """Losses that fall from 2 to about `low`, with relative `noise`, and four check steps."""
    draw = random.Random(seed)
    losses = tuple(((low + math.exp(-t / 10)) * level * (1 + noise * draw.uniform(-1, 1)),) for t in range(STEPS))
    return Numerics(
        losses=losses,
        norms=tuple(2.0 for _ in losses),
        by_tensor=((1.0, 1.0, 1.0),) * 4,
        parameters=NAMES,
        weight_digest=f"{seed}{noise}{level}{gradient}{low}",
        checks=tuple(check(step, gradient=gradient, drift=drift) for step in (0, 10, 20, 30)),
    )


PLAIN = run()
NUDGED = run(seed=1, noise=1e-7, gradient=1e-7, drift=1e-7)
NOISY = run(seed=2, noise=3e-3, gradient=0.03, drift=0.02)
"""As 16 bits make it."""


def with_check(base: Numerics, index: int, **changes: object) -> Numerics:
    checks = list(base.checks)
    checks[index] = replace(checks[index], **changes)  # type: ignore[arg-type]
    return replace(base, checks=tuple(checks))


def with_gradient(base: Numerics, name: str, error: float, product: float) -> Numerics:
    """The gradient of one parameter, at every check step: its error, and the plain gradient's share in it."""

    def changed(g: GradientDifference) -> GradientDifference:
        return replace(g, error=error * g.size, product=product * g.size**2) if g.name == name else g

    return replace(base, checks=tuple(replace(c, gradients=tuple(map(changed, c.gradients))) for c in base.checks))


def test_equal_bits() -> None:
    assert judge.not_bit_identical(PLAIN, PLAIN) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"losses": (*PLAIN.losses[:-1], (9.0,))}, "losses differ from step 40"),
        ({"norms": (3.0, *PLAIN.norms[1:])}, "gradients differ from step 1"),
        ({"weight_digest": "x"}, "final weights differ"),
        ({"buffer_digest": "x"}, "final buffers differ"),
        ({"generator_digest": "x"}, "other random numbers"),
        ({"losses": PLAIN.losses[:-1], "norms": PLAIN.norms[:-1]}, "ends after 39 steps"),
        ({"parameters": NAMES[:2]}, "2 parameters are trained, 3 in the plain run"),
        ({"losses": ((1.0, 1.0), *PLAIN.losses[1:])}, "2 backward passes in step 1, 1 in the plain run"),
    ],
)
def test_what_bit_identical_does_not_let_pass(change: dict[str, object], reason: str) -> None:
    assert reason in str(judge.not_bit_identical(PLAIN, replace(PLAIN, **change)))  # type: ignore[arg-type]


def test_rounding() -> None:
    candidate = run(seed=2, noise=2e-7, gradient=3e-7, drift=5e-7)
    assert judge.not_within_rounding(PLAIN, NUDGED, candidate) is None


ROUNDED = run(seed=2, noise=1e-7, gradient=1e-7, drift=1e-7)

BEYOND_ROUNDING: dict[str, tuple[Numerics, str]] = {
    "one gradient of three": (with_gradient(ROUNDED, "0.bias", 1e-3, 1.0), "gradient of 0.bias"),
    "an update": (with_check(ROUNDED, 2, updates=check(20, update=1e-3).updates), "optimizer's update of 0.weight"),
    "one loss": (replace(ROUNDED, losses=(*PLAIN.losses[:-1], (1.001,))), "loss differs by 1"),
    "weights between checks": (with_check(ROUNDED, 3, drift=check(30, drift=1e-2).drift), "0.weight is off by 1.0e-02"),
    "random numbers": (with_check(ROUNDED, 1, same_generators=False), "other random numbers by step 11"),
    "a gradient that is not there": (with_check(ROUNDED, 1, unlike="0.bias has no gradient"), "0.bias has no gradient"),
    "a length": (replace(ROUNDED, norms=PLAIN.norms[:-1]), "ends after 39"),
}


def test_a_unit_that_switches_sides_is_explained_by_plain_runs_that_were_moved_farther() -> None:
    """It changes the gradient of one check step far more than rounding changes those of others."""
    candidate = with_check(ROUNDED, 2, gradients=check(20, gradient=2e-3).gradients)
    assert "gradient of 0.weight" in str(judge.not_within_rounding(PLAIN, NUDGED, candidate))
    assert judge.is_seldom_beyond_rounding(PLAIN, NUDGED, candidate)
    elsewhere = with_check(ROUNDED, 1, gradients=check(10, gradient=3e-3).gradients)
    merged = judge.with_farther(PLAIN, NUDGED, elsewhere)
    assert judge.not_within_rounding(PLAIN, merged, candidate) is not None
    there = with_check(ROUNDED, 2, gradients=check(20, gradient=3e-3).gradients)
    assert judge.not_within_rounding(PLAIN, judge.with_farther(PLAIN, merged, there), candidate) is None


def test_moving_weights_farther_explains_no_more_of_what_is_smooth() -> None:
    farther = run(seed=5, noise=judge.FARTHER * 1e-7, gradient=judge.FARTHER * 1e-7, drift=judge.FARTHER * 1e-7)
    merged = judge.with_farther(PLAIN, NUDGED, farther)
    assert [one.error for one in merged.checks[1].gradients] == pytest.approx([2e-7] * 3)
    assert [one.error for one in merged.checks[1].drift] == pytest.approx([1e-7] * 3)
    for change in (0, 7, 39):
        moved = abs(merged.losses[change][0] / PLAIN.losses[change][0] - 1)
        assert moved < 1.01e-7


def test_a_shorter_run_leaves_the_rest_as_it_is() -> None:
    farther = replace(ROUNDED, losses=ROUNDED.losses[:5], checks=ROUNDED.checks[:1])
    merged = judge.with_farther(PLAIN, NUDGED, farther)
    assert merged.losses[5:] == NUDGED.losses[5:]
    assert merged.checks[1:] == NUDGED.checks[1:]


@pytest.mark.parametrize(
    "wrong",
    [
        with_gradient(ROUNDED, "0.bias", 1e-3, 1.0),  # in every step
        with_check(ROUNDED, 2, updates=check(20, update=1e-3).updates),  # an optimizer has no unit that switches
        with_check(ROUNDED, 1, same_generators=False),
        ROUNDED,  # nothing is beyond
    ],
)
def test_what_no_unit_explains(wrong: Numerics) -> None:
    assert not judge.is_seldom_beyond_rounding(PLAIN, NUDGED, wrong)


@pytest.mark.parametrize("what", BEYOND_ROUNDING)
def test_what_rounding_does_not_let_pass(what: str) -> None:
    candidate, reason = BEYOND_ROUNDING[what]
    assert reason in str(judge.not_within_rounding(PLAIN, NUDGED, candidate))


def test_a_gradient_that_rounding_decides_is_no_error() -> None:
    nudged = with_gradient(NUDGED, "0.bias", 0.5, 1.0)  # the bias before a normalisation
    candidate = with_gradient(ROUNDED, "0.bias", 1.4, 0.0001)
    assert judge.not_within_rounding(PLAIN, nudged, candidate) is None
    assert judge.not_reduced(PLAIN, nudged, with_gradient(NOISY, "0.bias", 30.0, 4.0)) is None


def test_noise_of_sixteen_bits_is_reduced_and_not_rounding() -> None:
    assert judge.not_reduced(PLAIN, NUDGED, NOISY) is None
    assert judge.diverges(PLAIN, NOISY) is None
    assert judge.drifts(PLAIN, NOISY) is None
    assert judge.not_within_rounding(PLAIN, NUDGED, NOISY) is not None


def with_own_gradients(base: Numerics, update: float) -> Numerics:
    """A script that updates its weights itself: nothing is replaced, and updates are off as its gradients are."""
    checks = tuple(replace(c, replaced=False, updates=check(c.step, update=update).updates) for c in base.checks)
    return replace(base, checks=checks)


@pytest.mark.parametrize(("update", "accepted"), [(0.006, True), (0.06, True), (0.3, False)])
def test_updates_of_a_script_without_an_optimizer_are_as_noisy_as_its_gradients(update: float, accepted: bool) -> None:
    """word_language_model clips and updates by hand: bf16 was refused there, however right."""
    nudged = with_own_gradients(NUDGED, 1e-7)
    found = judge.not_reduced(PLAIN, nudged, with_own_gradients(NOISY, update))
    assert (found is None) is accepted, found
    assert "of its size" in str(judge.not_within_rounding(PLAIN, nudged, with_own_gradients(PLAIN, update)))


UNSTABLE = {0: 0.004, 2: 0.01, 4: 0.02, 10: 0.15, 20: 3.4, 30: 0.8}
"""What a 16-bit rounding error in the weights does to the gradients of an LSTM that carries its hidden state: measured
on word_language_model, learning rate 20."""


def unstable(scale: float = 1.0, **changed: float) -> Numerics:
    """With gradients that differ by as much, times `scale`; `changed` by 'at_20'."""
    steps = UNSTABLE | {int(name.removeprefix("at_")): share for name, share in changed.items()}
    return replace(NOISY, checks=tuple(check(step, gradient=scale * share) for step, share in steps.items()))


def test_where_noise_alone_changes_a_gradient_the_other_check_steps_count() -> None:
    """bf16 was refused over 43 steps and accepted over 5, however right."""
    rough, nudged = unstable(), unstable(2.0**-15)
    candidate = unstable(0.7, at_30=1.3)
    assert "whole gradient differs" in str(judge.not_reduced(PLAIN, nudged, candidate))
    assert judge.differs_only_later(PLAIN, nudged, candidate)
    assert judge.not_reduced(PLAIN, nudged, candidate, rough) is None
    where = judge.where_stable(rough)
    assert where == " (at 3 of 6 check steps; at others such noise alone changes them by up to 340%)"
    assert judge.where_stable(NOISY) == ""


@pytest.mark.parametrize(
    ("candidate", "reason"),
    [
        (unstable(0.7, at_20=16.0), "differs by 1120% of its size at step 21; 16-bit noise"),
        (unstable(0.7, at_2=1.4, at_4=1.4), "the whole gradient differs by 98.0%"),
        (with_gradient(unstable(0.7), "0.bias", 1.0, 0.0), "the whole gradient differs by 57.7%"),
        (replace(unstable(0.7), finite=False), "infinite or NaN"),
    ],
)
def test_what_is_wrong_at_stable_steps_or_by_far_is_no_noise(candidate: Numerics, reason: str) -> None:
    assert reason in str(judge.not_reduced(PLAIN, unstable(2.0**-15), candidate, unstable()))


def test_with_too_few_stable_steps_nothing_is_shown() -> None:
    rough = unstable(at_4=0.5)
    reason = judge.not_reduced(PLAIN, unstable(2.0**-15), unstable(0.7), rough)
    assert "at fewer than 3 check steps: 16-bit noise in the weights alone changes it by 65% at 4 of 6" in str(reason)


def test_a_run_that_is_off_from_the_first_check_step_on_is_wrong() -> None:
    assert not judge.differs_only_later(PLAIN, NUDGED, unstable(at_0=1.0))
    assert not judge.differs_only_later(PLAIN, NUDGED, replace(NOISY, finite=False))


def test_gradients_that_one_rounding_error_decides_show_nothing() -> None:
    """They were left out, all of them, and so nothing was compared."""
    nudged = replace(NUDGED, checks=tuple(check(one.step, gradient=0.1) for one in NUDGED.checks))
    wrong = with_gradient(NOISY, "0.bias", 2.0, -1.0)
    assert "16 bits say nothing" in str(judge.not_reduced(PLAIN, nudged, wrong))


def test_early_stretches_are_too_short_to_be_compared_with_others() -> None:
    steps = (0, 2, 4, 20, 40, 60)
    run = replace(NOISY, checks=tuple(check(step, drift=0.5 if step <= 4 else 0.02) for step in steps))
    assert sorted(judge._stretches(run)) == [20, 40, 60]
    assert sorted(judge._stretches(replace(run, checks=run.checks[:3]))) == [2, 4]


BEYOND_REDUCED: dict[str, tuple[Numerics, str]] = {
    "inverted": (with_gradient(NOISY, "0.bias", 2.0, -1.0), "gradient"),
    "lost": (with_gradient(NOISY, "0.bias", 1.0, 0.0), "gradient"),
    "halved": (with_gradient(NOISY, "0.bias", 0.5, 0.5), "gradient"),
    "drowned": (run(seed=2, noise=3e-3, gradient=1.3), "whole gradient differs by 130.0%"),
    "an update": (with_check(NOISY, 2, updates=check(20, update=1e-3).updates), "from the same gradients"),
    "NaN": (replace(NOISY, finite=False), "infinite or NaN"),
}
ASTRAY: dict[str, tuple[Numerics, str]] = {
    "another batch": (replace(NOISY, losses=(*NOISY.losses[:24], (1.7,), *NOISY.losses[25:])), "loss of step 25"),
    "a step in ten lost": (
        run(seed=2, noise=3e-3, gradient=0.005, drift=0.1),
        "the weights deviate by 10% of their change",
    ),
    "a lost momentum": (with_check(NOISY, 2, drift=check(20, drift=0.4).drift), "before step 21"),
}


@pytest.mark.parametrize("what", BEYOND_REDUCED)
def test_what_reduced_does_not_let_pass(what: str) -> None:
    candidate, reason = BEYOND_REDUCED[what]
    assert reason in str(judge.not_reduced(PLAIN, NUDGED, candidate))


@pytest.mark.parametrize("what", ASTRAY)
def test_a_run_that_diverges_between_check_steps_is_not_reduced(what: str) -> None:
    candidate, reason = ASTRAY[what]
    assert reason in str(judge.diverges(PLAIN, candidate))
    assert reason in str(judge.diverges(PLAIN, candidate, NOISY))


def test_a_step_in_which_training_amplifies_noise_does_not_stand_out() -> None:
    """MNIST at a learning rate of 1: bf16 was refused for the loss of step 14, however right."""
    candidate, reason = ASTRAY["another batch"]

    def amplified(step: int, loss: float) -> Numerics:
        return replace(NOISY, losses=(*NOISY.losses[:step], (loss,), *NOISY.losses[step + 1 :]))

    assert judge.diverges(PLAIN, candidate, amplified(22, 1.35)) is None
    assert reason in str(judge.diverges(PLAIN, candidate, amplified(15, 1.35)))  # before another check step
    assert judge.diverges(PLAIN, candidate, amplified(15, 1.9)) is None  # more than this: such noise stands out too
    stretch, _ = ASTRAY["a lost momentum"]
    assert judge.diverges(PLAIN, stretch, with_check(NOISY, 2, drift=check(20, drift=0.2).drift)) is None


def test_noise_in_the_weights_explains_a_step_that_noise_in_the_gradients_does_not_and_no_other() -> None:
    """word_language_model at a learning rate of 20: bf16 was refused for the loss of step 28, however right."""
    candidate, reason = ASTRAY["another batch"]

    def rough(step: int) -> Numerics:
        return replace(NOISY, losses=(*NOISY.losses[:step], (1.4,), *NOISY.losses[step + 1 :]))

    assert reason in str(judge.diverges(PLAIN, candidate, NOISY))
    assert judge.diverges(PLAIN, candidate, NOISY, rough=rough(22)) is None
    for elsewhere in (3, 15, 30):
        assert reason in str(judge.diverges(PLAIN, candidate, NOISY, rough=rough(elsewhere)))
    for what in ("a step in ten lost", "a lost momentum"):
        lost, way = ASTRAY[what]
        moved = run(seed=5, noise=3e-3, gradient=0.005, drift=0.4)
        assert way in str(judge.diverges(PLAIN, lost, NOISY, rough=moved))


def test_few_parameters_with_large_noise_do_not_hide_behind_the_others() -> None:
    drowned = with_gradient(NOISY, "0.bias", 1.2, 1.0)
    small = {"0.weight": 100.0, "0.bias": 1.0, "2.weight": 100.0}

    def sized(base: Numerics) -> Numerics:
        def scaled(g: GradientDifference) -> GradientDifference:
            by = small[g.name]
            return replace(g, error=g.error * by, size=g.size * by, product=g.product * by**2)

        return replace(base, checks=tuple(replace(c, gradients=tuple(map(scaled, c.gradients))) for c in base.checks))

    assert "16 bits cannot represent it" in str(judge.not_reduced(PLAIN, sized(NUDGED), sized(drowned)))


@pytest.mark.parametrize("low", [1.0, 0.05, 0.001])
@pytest.mark.parametrize("factor", [0.5, 1.1, 2.3, 7.4])
def test_a_later_loss_that_is_some_times_as_large_is_never_reduced(low: float, factor: float) -> None:
    plain, coarse = run(low=low), run(low=low, seed=3, noise=3e-3)
    other = replace(plain, losses=tuple((loss * (factor if t > 15 else 1),) for t, (loss,) in enumerate(plain.losses)))
    assert "in the later half" in str(judge.drifts(plain, other, coarse))


def test_drift_that_the_scripts_own_chaos_explains() -> None:
    chaotic = replace(PLAIN, losses=tuple((loss * 1.04,) for (loss,) in PLAIN.losses))
    assert judge.drifts(PLAIN, run(level=1.05), chaotic) is None
    assert judge.drifts(PLAIN, run(level=1.05), run(seed=3, noise=3e-3)) is not None


def test_each_loss_of_a_step_counts() -> None:
    two = replace(PLAIN, losses=tuple((100.0, loss) for (loss,) in PLAIN.losses))
    worse = replace(PLAIN, losses=tuple((100.0, 1.2 * loss) for (loss,) in PLAIN.losses))
    assert judge.drifts(two, worse) is not None
    assert judge.drifts(two, worse, two) is not None


BROKEN: dict[str, Callable[[Numerics], Numerics]] = {
    "loss": lambda n: replace(n, losses=(*n.losses[:-1], (math.nan,)), weight_digest="x"),
    "infinite loss": lambda n: replace(n, losses=(*n.losses[:-1], (math.inf,)), weight_digest="x"),
    "norm": lambda n: replace(n, norms=(*n.norms[:-1], math.nan), weight_digest="x"),
    "weights": lambda n: replace(n, finite=False, weight_digest="x"),
}


@pytest.mark.parametrize("where", BROKEN)
def test_nan_passes_nowhere(where: str) -> None:
    broken = BROKEN[where](PLAIN)
    assert judge.not_bit_identical(PLAIN, broken)
    assert judge.not_within_rounding(PLAIN, NUDGED, broken)
    assert judge.not_reduced(PLAIN, NUDGED, broken)
    assert judge.drifts(PLAIN, broken)
    assert numerics.not_alike([PLAIN] * 3, [broken] * 3)[0]


def test_a_script_that_is_nan_itself_may_stay_so() -> None:
    plain = BROKEN["loss"](PLAIN)
    assert judge.not_bit_identical(plain, plain) is None
    assert judge.not_within_rounding(plain, NUDGED, replace(plain, weight_digest="other")) is None


def drifted(base: Numerics, index: int, share: float) -> Numerics:
    """'0.bias' is so far off its way at one check step."""
    found = base.checks[index].drift
    return with_check(base, index, drift=tuple(replace(d, error=share) if d.name == "0.bias" else d for d in found))


def test_before_the_first_check_a_tensor_may_go_astray_as_far_as_rounding_takes_it_later() -> None:
    """A gradient that is all cancellation, as Adam follows it: a lever that holds from the start has made steps by
    the first check, and the nudged run begins there."""
    nudged = drifted(NUDGED, 2, 3e-4)
    assert judge.not_within_rounding(PLAIN, nudged, drifted(NUDGED, 0, 6e-3)) is None
    assert "0.bias" in str(judge.not_within_rounding(PLAIN, nudged, drifted(NUDGED, 0, 2e-2)))
    assert "0.bias" in str(judge.not_within_rounding(PLAIN, nudged, drifted(NUDGED, 1, 6e-3)))
    assert "0.bias" in str(judge.not_within_rounding(PLAIN, NUDGED, drifted(NUDGED, 0, 6e-3)))


def unrepeatable(level: float, seeds: range, norm: float = 1.0) -> list[Numerics]:
    runs = [run(seed=seed, noise=0.15, level=level) for seed in seeds]
    return [replace(one, by_tensor=((norm, 1.0, 1.0),) * 4) for one in runs]


PLAINS = unrepeatable(1, range(3))


@pytest.mark.parametrize("factor", [0.5, 1.2, 2.0, 10.0])
def test_levels_that_differ_are_seen_without_any_step_to_compare(factor: float) -> None:
    reason, _ = numerics.not_alike(PLAINS, unrepeatable(factor, range(5, 8)))
    assert "off those of plain runs" in str(reason)


def test_levels_that_agree_come_with_what_would_have_been_seen() -> None:
    reason, resolution = numerics.not_alike(PLAINS, unrepeatable(1, range(5, 8)))
    assert reason is None
    assert resolution is not None
    assert 0.001 < resolution < 0.15


def test_levels_from_the_same_seeds_are_compared_in_pairs() -> None:
    plains = unrepeatable(1, range(5))
    found = numerics.paired_difference(plains, unrepeatable(1.02, range(5)))
    assert found is not None
    assert found.mean == pytest.approx(0.02, abs=1e-3)
    assert found.half_width < 0.002  # the noise of a seed is in both runs
    assert found.resolution == numerics.STATISTICAL_LEAST
    assert str(found).startswith("+2.0% (±0.")
    apart = numerics.paired_difference(plains, unrepeatable(1, range(5, 10)))
    assert apart is not None
    assert abs(apart.mean) < apart.half_width
    assert numerics.paired_difference(plains[:1], plains[:1]) is None
    assert numerics.paired_difference([Numerics(losses=((),) * 5, norms=(None,) * 5)] * 3, plains[:3]) is None


def test_a_gradient_of_another_size_is_seen_where_the_losses_are_too_noisy() -> None:
    assert "gradient of 0.weight" in str(numerics.not_alike(PLAINS, unrepeatable(1, range(5, 8), norm=0.3))[0])


def test_nothing_is_shown_by_runs_that_differ_too_much() -> None:
    wild = [run(seed=seed, level=level) for seed, level in ((0, 0.3), (1, 1.0), (2, 2.0))]
    reason, resolution = numerics.not_alike(wild, wild)
    assert "would not be detected" in str(reason)
    assert resolution is not None
    assert resolution > 0.25


def test_a_single_step_from_the_plain_gradients_says_nothing_of_the_way() -> None:
    checks = (check(0), check(2, drift=0.3), check(3, drift=1e-8))
    found = replace(NOISY, checks=checks)
    assert judge._stretches(found) == {2: pytest.approx(0.3)}
    own = replace(found, checks=(*checks[:1], replace(checks[1], replaced=False), checks[2]))
    assert list(judge._stretches(own)) == [2, 3]


def test_nothing_recorded() -> None:
    nothing = Numerics(losses=((),) * 5, norms=(None,) * 5)
    assert judge.not_bit_identical(nothing, nothing) is None
    assert judge.largest_loss_difference(nothing, nothing) is None
    assert "no gradient" in str(judge.not_reduced(nothing, nothing, nothing))
    assert "losses to compare" in str(judge.drifts(nothing, nothing, nothing))


def test_losses_that_are_not_finite_show_no_level() -> None:
    undefined = [replace(run, losses=tuple((math.nan,) for _ in run.losses)) for run in PLAINS]
    reason, seen = numerics.not_alike(undefined, undefined)
    assert (reason, seen) == ("losses of the script itself are inf or NaN: there is nothing to compare", None)


OVERFLOWED = replace(PLAIN, norms=(math.inf, *PLAIN.norms[1:]))
"""The loss scale was too large at first, so a gradient was infinite, once."""


@pytest.mark.parametrize(
    "broken",
    [
        replace(OVERFLOWED, losses=(*PLAIN.losses[:20], *((math.nan,),) * 20), weight_digest="x"),
        replace(OVERFLOWED, norms=(math.inf, *(math.nan,) * 39), weight_digest="x"),
        replace(OVERFLOWED, finite=False, weight_digest="x"),
    ],
)
def test_one_number_of_the_plain_run_that_is_not_finite_excuses_no_other(broken: Numerics) -> None:
    """A run that was NaN from the second step on was 'within rounding'."""
    assert "infinite or NaN" in str(judge.not_within_rounding(OVERFLOWED, NUDGED, broken))
    assert "infinite or NaN" in str(judge.not_reduced(OVERFLOWED, NUDGED, broken))
    assert "infinite or NaN" in str(judge.drifts(OVERFLOWED, broken))
    assert judge.not_within_rounding(OVERFLOWED, NUDGED, replace(OVERFLOWED, weight_digest="x")) is None


def test_a_loss_that_becomes_zero_is_compared_with_what_it_was() -> None:
    """As a hinge loss does: no difference from zero was seen."""

    def hinge(least: float) -> Numerics:
        return replace(PLAIN, losses=tuple((max(least, 1 - step / 10),) for step in range(STEPS)))

    assert "in the later half" in str(judge.drifts(hinge(0.0), hinge(0.5)))
    assert judge.drifts(hinge(0.0), hinge(1e-4)) is None
    zero = replace(PLAIN, losses=((0.0,),) * STEPS)
    assert judge.drifts(zero, zero) is None
    assert "in the later half" in str(judge.drifts(zero, hinge(0.5)))


def test_a_large_buffer_does_not_hide_how_far_the_weights_are_off() -> None:
    """Its size counted as a change: beside a table of positions weights could go anywhere."""
    positions = TensorDifference(name="Net#0.positions", error=0.0, moved=300.0, rounding=1e-5)

    def beside(base: Numerics) -> Numerics:
        return replace(base, checks=tuple(replace(one, drift=(*one.drift, positions)) for one in base.checks))

    for what in ("a step in ten lost", "a lost momentum"):
        candidate, reason = ASTRAY[what]
        assert reason in str(judge.diverges(PLAIN, beside(candidate)))
    assert judge.diverges(PLAIN, beside(NOISY)) is None
    off = replace(positions, error=100.0)
    changed = replace(NOISY, checks=tuple(replace(one, drift=(*one.drift, off)) for one in NOISY.checks))
    assert "the weights deviate by 33%" in str(judge.diverges(PLAIN, changed))


def test_gradients_that_are_not_in_every_step_are_compared_as_a_whole() -> None:
    """Where their number varies from step to step nothing was compared: gradients of zero were accepted."""

    def varying(seeds: range, norm: float) -> list[Numerics]:
        by_tensor = ((norm, 1.0, 1.0), (norm, 1.0)) * 2
        return [replace(one, by_tensor=by_tensor, norms=(norm,) * STEPS) for one in unrepeatable(1, seeds)]

    assert numerics.not_alike(varying(range(3), 1.0), varying(range(5, 8), 1.0))[0] is None
    assert "x0.00 that of plain runs" in str(numerics.not_alike(varying(range(3), 1.0), varying(range(5, 8), 0.0))[0])


def test_runs_with_fewer_gradients_or_steps_are_not_alike() -> None:
    fewer = [replace(one, by_tensor=((1.0, 1.0),) * 4) for one in unrepeatable(1, range(5, 8))]
    assert numerics.not_alike(PLAINS, fewer)[0] == "2 parameters get gradients, 3 in plain runs"
    shorter = [replace(one, losses=one.losses[:30], norms=one.norms[:30]) for one in unrepeatable(1, range(5, 8))]
    assert numerics.not_alike(PLAINS, shorter)[0] == "it ends after 30 steps, plain runs after 40 at least"
