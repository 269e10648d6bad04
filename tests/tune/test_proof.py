"""The judge of numbers, given recorded runs."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from flatout.tune.proof import Numerics, judge

STEPS = 40


def run(
    *, seed: int = 0, noise: float = 0.0, growth: float = 1.0, level: float = 1.0, gradient: float = 0.0
) -> Numerics:
    """Losses that fall from 2 to about 1. `noise` is relative and grows; `gradient` is the relative error of step 1."""
    draw = random.Random(seed)
    losses = tuple(
        (1 + math.exp(-t / 10)) * level * (1 + noise * growth**t * draw.uniform(-1, 1)) for t in range(STEPS)
    )
    fixed = random.Random(99)
    sample = tuple(fixed.gauss(0, 1) * (1 + gradient * draw.choice((-1, 1))) for _ in range(64))
    weights = tuple(fixed.gauss(0, 1) * (1 + noise * draw.uniform(-1, 1)) for _ in range(64))
    return Numerics(losses, tuple(2.0 for _ in losses), ((sample, sample),), f"{seed}{noise}{level}{gradient}", weights)


PLAIN = run()
NUDGED = run(seed=1, noise=1e-7, growth=1.1, gradient=1e-7)


def test_equal_bits() -> None:
    proof = judge(PLAIN, PLAIN, NUDGED, PLAIN, claimed="rounding")
    assert proof.verdict == "bit-same"
    assert proof.repeatable
    assert proof.steps == STEPS


def test_rounding() -> None:
    candidate = run(seed=2, noise=2e-7, growth=1.1, gradient=3e-7)
    assert judge(PLAIN, PLAIN, NUDGED, candidate, claimed="rounding").verdict == "within rounding"
    assert judge(PLAIN, PLAIN, NUDGED, candidate, claimed="reduced").verdict == "within rounding"


def test_a_gradient_that_is_off_by_a_thousandth() -> None:
    candidate = run(seed=2, noise=1e-7, growth=1.1, gradient=1e-3)
    proof = judge(PLAIN, PLAIN, NUDGED, candidate, claimed="rounding")
    assert proof.verdict == "rejected"
    assert "gradient" in proof.reason


def test_noise_of_sixteen_bits() -> None:
    candidate = run(seed=2, noise=3e-3, gradient=0.02)
    proof = judge(PLAIN, PLAIN, NUDGED, candidate, claimed="reduced")
    assert proof.verdict == "reduced"
    assert proof.holds
    assert judge(PLAIN, PLAIN, NUDGED, candidate, claimed="rounding").verdict == "rejected"


def test_drift() -> None:
    candidate = run(seed=2, noise=1e-3, level=1.08, gradient=0.02)
    proof = judge(PLAIN, PLAIN, NUDGED, candidate, claimed="reduced")
    assert proof.verdict == "rejected"
    assert "later half" in proof.reason


def test_gradients_beyond_sixteen_bits() -> None:
    assert judge(PLAIN, PLAIN, NUDGED, run(seed=2, gradient=0.5), claimed="reduced").verdict == "rejected"


def nan_loss(numerics: Numerics) -> Numerics:
    return replace(numerics, losses=(*numerics.losses[:-1], math.nan), digest="x")


BROKEN: dict[str, Callable[[Numerics], Numerics]] = {
    "loss": nan_loss,
    "infinite loss": lambda n: replace(n, losses=(*n.losses[:-1], math.inf), digest="x"),
    "norm": lambda n: replace(n, norms=(*n.norms[:-1], math.nan), digest="x"),
    "weights": lambda n: replace(n, weights=(math.nan, *n.weights[1:]), digest="x"),
}


@pytest.mark.parametrize("where", BROKEN)
@pytest.mark.parametrize("claimed", ["bit-same", "rounding", "reduced"])
@pytest.mark.parametrize("again", [PLAIN, run(seed=5, noise=0.05)])
def test_nan_is_rejected_everywhere(where: str, claimed: Any, again: Numerics) -> None:
    assert judge(PLAIN, again, NUDGED, BROKEN[where](PLAIN), claimed=claimed).verdict == "rejected"


def test_a_script_that_is_nan_itself_may_stay_so() -> None:
    plain = nan_loss(PLAIN)
    assert judge(plain, plain, NUDGED, plain, claimed="rounding").verdict == "bit-same"
    candidate = replace(plain, digest="other")
    assert judge(plain, plain, NUDGED, candidate, claimed="rounding").verdict == "within rounding"


def test_bit_same_claimed_but_not_kept() -> None:
    proof = judge(PLAIN, PLAIN, NUDGED, run(seed=2, noise=1e-7), claimed="bit-same")
    assert proof.verdict == "rejected"
    assert "change no bit" in proof.reason
    only_weights = judge(PLAIN, PLAIN, NUDGED, replace(PLAIN, digest="other"), claimed="bit-same")
    assert only_weights.reason.endswith("gradients or weights differ")


def test_a_script_that_does_not_repeat_itself() -> None:
    again = run(seed=5, noise=0.05)
    proof = judge(PLAIN, again, NUDGED, run(seed=6, noise=0.05, gradient=0.4), claimed="bit-same")
    assert proof.verdict == "unproved"
    assert not proof.repeatable
    assert proof.notes
    far = judge(PLAIN, again, NUDGED, run(seed=6, noise=0.05, level=1.5, gradient=0.4), claimed="bit-same")
    assert far.verdict == "rejected"


def test_nothing_recorded() -> None:
    nothing = Numerics((None,) * 5, (None,) * 5, (), "a", ())
    assert judge(nothing, nothing, nothing, nothing, claimed="rounding").verdict == "bit-same"
    proof = judge(nothing, nothing, nothing, replace(nothing, digest="b"), claimed="rounding")
    assert proof.loss_difference is None


def test_from_an_answer() -> None:
    answer = {
        "losses": [1.0, None],
        "gradient_norms": [2.0, 3.0],
        "gradient_samples": [[[0.5]]],
        "weight_digest": "d",
        "weight_sample": [1.0],
    }
    numerics = Numerics.from_answer(answer)
    assert numerics.steps == 2
    assert numerics.gradient_samples == (((0.5,),),)
