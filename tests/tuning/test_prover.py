"""Which runs a proof makes and what it concludes, with recorded numbers in place of processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from flatout.errors import TrialError
from flatout.levers.lever import Choice, Lever
from flatout.plan_choices import Exactness
from flatout.script.entry import Target
from flatout.script.trial.answers import TrialEnded
from flatout.script.trial.setup import TrialSetup
from flatout.search.deadline import Deadline
from flatout.tuning import proof as judge
from flatout.tuning.numerics import Numerics
from flatout.tuning.prover import MOST_FARTHER, Pattern, Prover, RunsMade
from tests.tuning.test_proof import NOISY, NUDGED, PLAIN, check, run, unstable, with_check, with_gradient


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
    """`results` by the labels of the choices; plain runs are PLAIN unless `plain` says otherwise, and then one from
    moved weights is as far from PLAIN as the second of those."""

    def __init__(
        self, folder: Path, results: dict[tuple[str, ...], Any], plain: Sequence[Numerics] = (), **pattern: Any
    ):
        setup = TrialSetup(target=Target(path="train.py"), work_folder=folder)
        super().__init__(setup, Pattern(step_seconds=1e-3, **pattern), Deadline(100.0))
        self.results, self.plain, self.made = results, list(plain), []
        self.nudged = plain[1] if len(plain) > 1 else NUDGED
        self.noisy, self.farther, self.coarse = [NOISY] * 2, [NUDGED] * 9, run(seed=3, noise=3e-3)
        self.rough = NOISY

    def _record(
        self,
        choices: Any,
        *,
        role: Any = "free",
        nudge: Any = "none",
        nudge_seed: int = 0,
        nudge_ulps: int = 1,
        gradient_noise: float = 0.0,
        weight_noise: bool = False,
        then: Any = None,
    ) -> Numerics:
        labels = tuple(choice.label for choice in choices)
        self.made.append((*labels, role, gradient_noise or ("weights" if weight_noise else nudge)))
        if nudge_seed:
            return self.farther.pop(0)
        if gradient_noise or weight_noise:
            return self.noisy[int(weight_noise)]
        if nudge == "rounding":
            return self.nudged
        if nudge == "16-bit":
            return self.rough if role == "checked" else self.coarse
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
        ("reduces", "rounds", "bits", "free", "none"),
    ]


def test_a_run_from_moved_weights_that_is_near_shows_that_the_script_repeats_itself(tmp_path: Path) -> None:
    prover = Recorded(tmp_path, {("rounds",): ROUNDED})
    proof = prover.prove([ROUNDS])
    assert proof.verdict == "within rounding"
    assert proof.repeatable is None
    assert prover.made == [("reference", "none"), ("checked", "rounding"), ("rounds", "checked", "none")]


@pytest.mark.parametrize("choices", [[BITS], [ROUNDS], [REDUCES], [ROUNDS, BITS], [REDUCES, ROUNDS, BITS]])
def test_the_runs_that_are_made_are_those_that_time_is_kept_for(tmp_path: Path, choices: list[Choice]) -> None:
    results = {("bits",): PLAIN, ("rounds",): ROUNDED, ("rounds", "bits"): ROUNDED, ("reduces",): NOISY}
    prover = Recorded(tmp_path, results | {("reduces", "rounds", "bits"): NOISY})
    assert prover.prove(choices).holds
    runs = RunsMade.for_claims([choice.exactness for choice in choices])
    assert len(prover.made) == runs.all
    assert sum(len(made) > 2 for made in prover.made) == runs.with_levers


@pytest.mark.parametrize(("shown_by", "runs"), [(1, 1), (3, 3), (None, MOST_FARTHER)])
def test_plain_runs_moved_farther_are_made_until_they_explain_it(
    tmp_path: Path, shown_by: int | None, runs: int
) -> None:
    switched = with_check(ROUNDED, 2, gradients=check(20, gradient=2e-3).gradients)
    prover = Recorded(tmp_path, {("rounds",): switched, ("rounds", "bits"): switched, ("bits",): PLAIN})
    if shown_by is not None:
        prover.farther[shown_by - 1] = with_check(ROUNDED, 2, gradients=check(20, gradient=3e-3).gradients)
    proof = prover.prove([ROUNDS])
    assert proof.verdict == ("rejected" if shown_by is None else "within rounding")
    assert prover.made.count(("checked", "rounding")) == 1 + runs
    prover.prove([ROUNDS, BITS])
    assert prover.made.count(("checked", "rounding")) == 1 + runs  # they are kept for other sets of levers


def test_without_time_for_them_none_is_made(tmp_path: Path) -> None:
    switched = with_check(ROUNDED, 2, gradients=check(20, gradient=2e-3).gradients)
    prover = Recorded(tmp_path, {("rounds",): switched})
    prover._latest = Deadline(0.0)
    assert prover.prove([ROUNDS]).verdict == "rejected"
    assert prover.made.count(("checked", "rounding")) == 1


def test_the_first_claim_that_fails_ends_the_proof(tmp_path: Path) -> None:
    proof = Recorded(tmp_path, {("bits",): ROUNDED}).prove([BITS, REDUCES])
    assert proof.verdict == "rejected"
    assert [claim.levers for claim in proof.claims] == [("bits",)]
    assert "should be bit-identical, but the losses differ" in proof.reason


def test_a_reduced_lever_may_turn_out_better_than_it_claims(tmp_path: Path) -> None:
    assert Recorded(tmp_path, {("reduces",): ROUNDED}).prove([REDUCES]).verdict == "within rounding"


@pytest.mark.parametrize("chaotic", [True, False])
def test_losses_that_drift_are_held_against_a_plain_run_with_noise_in_its_weights(
    tmp_path: Path, chaotic: bool
) -> None:
    drifting = replace(NOISY, losses=run(level=1.05).losses)
    prover = Recorded(tmp_path, {("reduces",): [NOISY, drifting], ("reduces", "bits"): [NOISY, drifting]})
    if chaotic:
        prover.coarse = replace(PLAIN, losses=tuple((1.04 * loss,) for (loss,) in PLAIN.losses))
    proof = prover.prove([REDUCES])
    assert proof.verdict == ("reduced" if chaotic else "rejected")
    assert ("16-bit noise in the first weights" if chaotic else "16-bit noise in the weights explains") in proof.reason
    assert prover.made[-1] == ("free", "16-bit")
    prover.results[("bits",)] = PLAIN
    prover.prove([REDUCES, BITS])
    assert prover.made.count(("free", "16-bit")) == 1  # it is kept for other sets of levers


@pytest.mark.parametrize("chaotic", [True, False])
def test_gradients_that_differ_later_are_held_against_a_plain_run_with_16_bit_noise(
    tmp_path: Path, chaotic: bool
) -> None:
    prover = Recorded(tmp_path, {("reduces",): unstable(0.7), ("reduces", "bits"): unstable(0.7)})
    prover.rough = unstable() if chaotic else NOISY
    proof = prover.prove([REDUCES])
    assert proof.verdict == ("reduced" if chaotic else "rejected")
    assert ("at 3 of 6 check steps" if chaotic else "the whole gradient differs by") in proof.reason
    prover.results[("bits",)] = PLAIN
    prover.prove([REDUCES, BITS])
    assert prover.made.count(("checked", "16-bit")) == 1  # it is kept for other sets of levers


def test_that_run_says_nothing_of_levers_that_do_not_need_it(tmp_path: Path) -> None:
    """Their verdict would depend on which others were proved before."""
    prover = Recorded(tmp_path, {("reduces",): unstable(0.7), ("reduces", "bits"): NOISY, ("bits",): PLAIN})
    prover.rough = unstable(at_4=0.5)  # too few stable check steps
    assert prover.prove([REDUCES]).verdict == "rejected"
    proof = prover.prove([REDUCES, BITS])
    assert (proof.verdict, "check steps; " in proof.reason) == ("reduced", False)


def test_without_time_for_that_run_the_lever_is_rejected(tmp_path: Path) -> None:
    prover = Recorded(tmp_path, {("reduces",): unstable(0.7)})
    prover.rough, prover._latest = unstable(), Deadline(0.0)
    assert prover.prove([REDUCES]).verdict == "rejected"
    assert ("checked", "16-bit") not in prover.made


@pytest.mark.parametrize("amplified", [True, False])
def test_what_diverges_is_held_against_a_plain_run_with_noisy_gradients(tmp_path: Path, amplified: bool) -> None:
    candidate = replace(NOISY, losses=(*NOISY.losses[:12], (1.9,), *NOISY.losses[13:]))
    prover = Recorded(tmp_path, {("reduces",): candidate})
    prover.noisy[0] = candidate if amplified else NOISY
    proof = prover.prove([REDUCES])
    assert proof.verdict == ("reduced" if amplified else "rejected")
    assert amplified or "loss of step 13" in proof.reason
    role, noise = prover.made[3]
    assert (role, noise) == ("checked", pytest.approx(judge.typical_gradient_difference(candidate)))
    assert noise > 0
    assert prover.made.count(("checked", noise)) == 1


def test_last_comes_noise_in_the_weights(tmp_path: Path) -> None:
    candidate = replace(NOISY, losses=(*NOISY.losses[:12], (1.9,), *NOISY.losses[13:]))
    prover = Recorded(tmp_path, {("reduces",): [candidate, NOISY]})
    prover.rough = candidate
    proof = prover.prove([REDUCES])
    assert proof.verdict == "reduced"
    assert "check steps; " not in proof.reason  # gradients were compared at all of them
    assert prover.made[-2:] == [("checked", "16-bit"), ("reduces", "free", "none")]


@pytest.mark.parametrize(("second", "verdict"), [(0.4, "reduced"), (0.3, "rejected")])
def test_where_noise_in_the_gradients_does_not_explain_it_the_weights_are_rounded(
    tmp_path: Path, second: float, verdict: str
) -> None:
    """An LSTM's loss was 41 % off in one step, and with noise alone 16 %: how far differs from one noise to another."""

    def off_by(share: float) -> Numerics:
        (plain,) = PLAIN.losses[12]
        return replace(NOISY, losses=(*NOISY.losses[:12], (plain + share * 0.6,), *NOISY.losses[13:]))

    prover = Recorded(tmp_path, {("reduces",): off_by(1.0)})
    prover.noisy = [off_by(0.25), off_by(second)]
    assert prover.prove([REDUCES]).verdict == verdict
    noise = pytest.approx(judge.typical_gradient_difference(NOISY))
    assert [made[1] for made in prover.made if made[0] == "checked"][1:3] == [noise, "weights"]


def test_a_wrong_gradient_is_rejected_at_every_claim(tmp_path: Path) -> None:
    for choice in (ROUNDS, REDUCES):
        wrong = with_gradient(NOISY, "0.bias", 2.0, -1.0)
        proof = Recorded(tmp_path, {(choice.label,): wrong}).prove([choice])
        assert proof.verdict == "rejected", choice


AGAIN = run(seed=4, noise=1e-6, gradient=1e-6, drift=1e-6)
"""A plain run of a script that repeats itself but for the order of additions."""


@pytest.mark.parametrize(
    ("choice", "result", "verdict"),
    [(BITS, ROUNDED, "within rounding"), (ROUNDS, ROUNDED, "within rounding"), (REDUCES, NOISY, "reduced")],
)
def test_where_plain_runs_differ_by_rounding_steps_are_compared_all_the_same(
    tmp_path: Path, choice: Choice, result: Numerics, verdict: str
) -> None:
    proof = Recorded(tmp_path, {(choice.label,): result}, plain=[PLAIN, AGAIN, AGAIN]).prove([choice])
    assert proof.verdict == verdict
    if choice is BITS:
        assert proof.repeatable is False
        assert "nothing finer can be proved" in proof.notes[0]
    wrong = with_gradient(result, "0.bias", 2.0, -1.0)
    rejected = Recorded(tmp_path, {(choice.label,): wrong}, plain=[PLAIN, AGAIN, AGAIN]).prove([choice])
    assert rejected.verdict == "rejected"
    assert "gradient" in rejected.reason
    noisy = Recorded(tmp_path, {(choice.label,): NOISY}, plain=[PLAIN, AGAIN, AGAIN]).prove([choice])
    assert noisy.claims[0].may_be_reduced is (choice is ROUNDS)  # what is to be the same bits is never relaxed


OTHERS = [run(seed=seed, noise=0.15) for seed in range(1, 4)]


@pytest.mark.parametrize("choice", [BITS, ROUNDS, REDUCES])
def test_a_script_that_does_not_repeat_itself_is_never_within_rounding(tmp_path: Path, choice: Choice) -> None:
    alike = [run(seed=seed, noise=0.15) for seed in range(5, 10)]
    proof = Recorded(tmp_path, {(choice.label,): alike}, plain=OTHERS).prove([choice])
    assert proof.verdict == "statistical"
    assert not proof.repeatable
    assert proof.resolution is not None
    assert "would not have been detected" in proof.reason
    worse = [run(seed=seed, noise=0.15, level=9.0) for seed in range(5, 10)]
    assert Recorded(tmp_path, {(choice.label,): worse}, plain=OTHERS).prove([choice]).verdict == "rejected"


def test_plain_runs_that_were_seen_to_differ_are_not_found_alike_by_a_nudged_one(tmp_path: Path) -> None:
    prover = Recorded(tmp_path, {("bits",): [run(seed=seed, noise=0.15) for seed in range(5, 10)]}, plain=OTHERS)
    prover.nudged = NUDGED
    assert prover.prove([BITS]).verdict == "statistical"
    assert ("checked", "rounding") not in prover.made


def test_a_lever_under_which_a_fresh_run_fails(tmp_path: Path) -> None:
    proof = Recorded(tmp_path, {("rounds",): TrialEnded(1, "Traceback\nValueError: no", 3)}).prove([ROUNDS])
    assert (proof.verdict, proof.reason) == ("rejected", "a new run with it failed: ValueError: no")


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


class FromStart(Claiming):
    switch = "process"


FROM_START = Choice(FromStart("allocator", "bit-identical"), True)


class Started:
    """In place of a trial; `log` has what was done in which order, `failing` the starts that fail."""

    alive = True

    log: ClassVar[list[str]] = []
    failing: ClassVar[list[int]] = []
    count: ClassVar[int] = 0

    def __init__(self, setup: TrialSetup, choices: Sequence[Choice] = (), *, label: str = "") -> None:
        type(self).count += 1
        self.name = f"{self.count}{'+' if choices else ''}"

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def spawn(self) -> None:
        self.log.append(f"spawn {self.name}")

    def start(self) -> None:
        if int(self.name.strip("+")) in self.failing:
            raise TrialError("no memory")

    def numerics(self, choices: Sequence[Choice], request: Any) -> dict[str, Any]:
        self.log.append(f"record {self.name}")
        return {"peak_resident_bytes": None}

    def close(self) -> None:
        self.log.append(f"close {self.name}")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> type[Started]:
    monkeypatch.setattr("flatout.script.trial.setup.TrialProcess", Started)
    monkeypatch.setattr(Numerics, "from_answer", lambda answer: PLAIN)
    monkeypatch.setattr(Started, "log", [])
    monkeypatch.setattr(Started, "failing", [])
    monkeypatch.setattr(Started, "count", 0)
    return Started


def unrecorded(folder: Path, **setup: Any) -> Prover:
    trials = TrialSetup(target=Target(path="train.py"), work_folder=folder, **setup)
    prover = Prover(trials, Pattern(step_seconds=1e-3), Deadline(100.0))
    prover._steps = 10
    return prover


def test_the_next_run_starts_while_one_is_recorded(tmp_path: Path, started: type[Started]) -> None:
    with unrecorded(tmp_path) as prover:
        prover._record([], then=[FROM_START])
        prover._record([FROM_START])
        prover._record([], then=[])
        prover._record([FROM_START])  # another one than was expected
    assert started.log == [
        *("spawn 1", "spawn 2+", "record 1", "close 1", "record 2+", "close 2+"),
        *("spawn 3", "spawn 4", "record 3", "close 3", "close 4", "spawn 5+", "record 5+", "close 5+"),
    ]


def test_with_the_network_of_the_machine_one_runs_after_the_other(tmp_path: Path, started: type[Started]) -> None:
    with unrecorded(tmp_path, allow_network=True) as prover:
        prover._record([], then=[FROM_START])
        prover._record([FROM_START])
    assert started.log == ["spawn 1", "record 1", "close 1", "spawn 2+", "record 2+", "close 2+"]


def test_the_last_process_of_each_side_stays_for_the_comparison(tmp_path: Path, started: type[Started]) -> None:
    with unrecorded(tmp_path) as prover:
        prover.keeps_pairs = 1
        prover._record([])
        assert prover.arms([BITS]) == []
        prover._record([])
        prover._record([BITS])
        assert started.log == [
            *("spawn 1", "record 1", "spawn 2", "record 2", "close 1", "spawn 3", "record 3"),
        ]
        (arms,) = prover.arms([BITS])
        assert [arm.process.name for arm in arms] == ["2", "3"]  # type: ignore[attr-defined]
        assert [arm.choices for arm in arms] == [(), [BITS]]
        assert prover.arms([BITS, FROM_START]) == []
    assert started.log[-2:] == ["close 2", "close 3"]


@pytest.mark.parametrize(("available", "kept"), [(8 << 30, [["3", "5"], ["2", "4"]]), (5 << 30, [["3", "5"]])])
def test_two_pairs_stay_where_there_is_memory_for_another_run(
    available: int, kept: list[list[str]], tmp_path: Path, started: type[Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flatout.tuning.prover.available_memory_bytes", lambda: available)
    with unrecorded(tmp_path) as prover:
        prover.keeps_pairs, prover._peak_bytes = 2, 4 << 30
        for choices in ([], [], [], [BITS], [BITS]):
            prover._record(choices)
        names = [[arm.process.name for arm in pair] for pair in prover.arms([BITS])]  # type: ignore[attr-defined]
        assert names == kept
    assert len([line for line in started.log if line.startswith("close")]) == 5


def test_processes_that_stay_make_room_where_another_one_fails(tmp_path: Path, started: type[Started]) -> None:
    started.failing = [2]
    with unrecorded(tmp_path) as prover:
        prover.keeps_pairs = 1
        prover._record([])
        prover._record([BITS])
        assert started.log == ["spawn 1", "record 1", "spawn 2", "close 2", "close 1", "spawn 3", "record 3", "close 3"]
        assert prover.arms([BITS]) == []


def test_what_fails_beside_another_run_is_tried_alone(tmp_path: Path, started: type[Started]) -> None:
    started.failing = [1, 5]
    with unrecorded(tmp_path) as prover:
        prover._record([], then=[FROM_START])
        assert started.log == ["spawn 1", "spawn 2+", "close 1", "close 2+", "spawn 3", "record 3", "close 3"]
        prover._record([], then=[FROM_START])
        started.failing = [5, 6]
        with pytest.raises(TrialError, match="no memory"):
            prover._record([FROM_START])
