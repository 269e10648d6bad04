"""Which runs a proof makes and what it concludes, with recorded numbers in place of processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flatout.levers.lever import Choice, Lever
from flatout.plan import Exactness
from flatout.script.entry import Target
from flatout.tune.deadline import Deadline
from flatout.tune.numerics import Numerics
from flatout.tune.prover import Pattern, Prover
from flatout.tune.trial_process import TrialEnded, TrialSetup
from tests.tune.test_proof import NOISY, NUDGED, PLAIN, run, with_gradient


class Claiming(Lever):
    plan_field = "threads"

    def __init__(self, name: str, exactness: Exactness) -> None:
        self.name, self.exactness = name, exactness  # type: ignore[misc]


BITS, ROUNDS, REDUCES = (
    Choice(Claiming(name, claim), True)
    for name, claim in (("bits", "bit-identical"), ("rounds", "rounding"), ("reduces", "reduced"))
)
ROUNDED = run(seed=2, noise=2e-7, gradient=3e-7, drift=5e-7)


class Recorded(Prover):
    """`results` by the labels of the choices; plain runs are PLAIN unless `plain` says otherwise."""

    def __init__(
        self, folder: Path, results: dict[tuple[str, ...], Any], plain: Sequence[Numerics] = (), **pattern: Any
    ):
        setup = TrialSetup(target=Target(path="train.py"), work_folder=folder)
        super().__init__(setup, Pattern(step_seconds=1e-3, **pattern), Deadline(100.0))
        self.results, self.plain, self.made = results, list(plain), []

    def _record(self, choices: Any, *, role: Any = "free", nudge: Any = "none") -> Numerics:
        labels = tuple(choice.label for choice in choices)
        self.made.append((*labels, role, nudge))
        if nudge == "rounding":
            return NUDGED
        if nudge == "16-bit":
            return run(seed=3, noise=3e-3)
        if not labels:
            return self.plain.pop(0) if self.plain else PLAIN
        found = self.results[labels]
        if isinstance(found, Exception):
            raise found
        return found.pop(0) if isinstance(found, list) else found


def test_claims_are_proved_strictest_first_on_top_of_each_other(tmp_path: Path) -> None:
    prover = Recorded(tmp_path, {("bits",): PLAIN, ("rounds", "bits"): ROUNDED, ("reduces", "rounds", "bits"): NOISY})
    proof = prover.prove([REDUCES, ROUNDS, BITS])
    assert [(claim.levers, claim.verdict) for claim in proof.claims] == [
        (("bits",), "bit-identical"),
        (("rounds",), "within rounding"),
        (("reduces",), "reduced"),
    ]
    assert proof.verdict == "reduced"
    assert proof.repeatable
    # the bit-identical run has shown that the script repeats itself: no second plain run
    assert prover.made == [
        ("reference", "none"),
        ("bits", "free", "none"),
        ("checked", "rounding"),
        ("rounds", "bits", "checked", "none"),
        ("reduces", "rounds", "bits", "checked", "none"),
        ("free", "16-bit"),
        ("reduces", "rounds", "bits", "free", "none"),
    ]


def test_the_first_claim_that_fails_ends_the_proof(tmp_path: Path) -> None:
    proof = Recorded(tmp_path, {("bits",): ROUNDED}).prove([BITS, REDUCES])
    assert proof.verdict == "rejected"
    assert [claim.levers for claim in proof.claims] == [("bits",)]
    assert "should be bit-identical, but the losses differ" in proof.reason


def test_a_reduced_lever_may_turn_out_better_than_it_claims(tmp_path: Path) -> None:
    assert Recorded(tmp_path, {("reduces",): ROUNDED}).prove([REDUCES]).verdict == "within rounding"


def test_a_wrong_gradient_is_rejected_at_every_claim(tmp_path: Path) -> None:
    for choice in (ROUNDS, REDUCES):
        wrong = with_gradient(NOISY, "0.bias", 2.0, -1.0)
        proof = Recorded(tmp_path, {(choice.label,): wrong}).prove([choice])
        assert proof.verdict == "rejected", choice


OTHERS = [run(seed=seed, noise=0.15) for seed in range(1, 4)]


@pytest.mark.parametrize("choice", [BITS, ROUNDS, REDUCES])
def test_a_script_that_does_not_repeat_itself_is_never_within_rounding(tmp_path: Path, choice: Choice) -> None:
    alike = [run(seed=seed, noise=0.15) for seed in range(5, 10)]
    proof = Recorded(tmp_path, {(choice.label,): alike}, plain=OTHERS).prove([choice])
    assert proof.verdict == "statistical"
    assert not proof.repeatable
    assert proof.resolution is not None
    assert "would not have been seen" in proof.reason
    worse = [run(seed=seed, noise=0.15, level=9.0) for seed in range(5, 10)]
    assert Recorded(tmp_path, {(choice.label,): worse}, plain=OTHERS).prove([choice]).verdict == "rejected"


def test_a_lever_under_which_a_fresh_run_fails(tmp_path: Path) -> None:
    proof = Recorded(tmp_path, {("rounds",): TrialEnded(1, "Traceback\nValueError: no", 3)}).prove([ROUNDS])
    assert (proof.verdict, proof.reason) == ("rejected", "a fresh run with it failed: ValueError: no")


def test_a_run_that_ends_early_is_another_run(tmp_path: Path) -> None:
    shorter = replace(PLAIN, losses=PLAIN.losses[:-1], norms=PLAIN.norms[:-1])
    assert "ends after 39 steps" in Recorded(tmp_path, {("rounds",): shorter}).prove([ROUNDS]).reason


def test_the_plain_script_ends_before_the_proof_does(tmp_path: Path) -> None:
    prover = Recorded(tmp_path, {("bits",): PLAIN}, plain=[replace(PLAIN, ended=True), PLAIN])
    assert prover.prove([BITS]).verdict == "bit-identical"
    assert prover.made[:2] == [("reference", "none"), ("reference", "none")]
    assert prover._steps == PLAIN.steps - 1


def test_the_horizon_covers_two_epochs_where_time_allows(tmp_path: Path) -> None:
    prover = Recorded(tmp_path, {("bits",): PLAIN}, epoch_steps=1000)
    proof = prover.prove([BITS])
    assert prover._steps == 2200
    assert proof.epochs == PLAIN.steps / 1000
    assert not proof.covers_epochs
    short = Recorded(tmp_path, {("bits",): PLAIN}, epoch_steps=10**6)
    short.prove([BITS])
    assert short._steps is not None
    assert short._steps < 20_000 + 1


def test_what_was_left_unseeded_is_told(tmp_path: Path) -> None:
    unseeded = replace(PLAIN, unseeded=("numpy.random.default_rng at train.py:3",))
    proof = Recorded(tmp_path, {("bits",): unseeded}, plain=[unseeded]).prove([BITS])
    assert "train.py:3" in proof.notes[0]
