"""The search, on models whose time and accuracy are made up: no clock of this machine is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from flatout.infer.choosing.closeness import Accuracy
from flatout.infer.choosing.inference_search import InferenceSearch, Limits, Option, in_turns
from flatout.plan import Plan

BF16 = Option(label="bf16", choices={"precision": "bf16"})
INT8 = Option(label="int8", choices={"weights": "int8"}, replaces=("precision",))
COMPILED = Option(label="compile", choices={"compile": "default"})
FOLDED = Option(label="folded", choices={"fold_batch_norm": True})
ONE_THREAD = Option(label="threads 1", choices={"threads": 1})


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Fake:
    """Ten items a run. `seconds`: of a run under these choices; `error`: against fp32."""

    seconds: Callable[[dict[str, Any]], float]
    error: Callable[[dict[str, Any]], float] = lambda chosen: 0.0
    first: Callable[[dict[str, Any]], float] = lambda chosen: 0.0
    obstacle: Callable[[dict[str, Any]], str] = lambda chosen: ""
    unit: str = "item"
    count: int = 10
    clock: FakeClock = field(default_factory=FakeClock)
    made: list[dict[str, Any]] = field(default_factory=list)

    def make(self, plan: Plan) -> FakeRunner:
        self.made.append(plan.choices())
        return FakeRunner(self, plan.choices())


class FakeRunner:
    notes = ("made up",)

    def __init__(self, fake: Fake, chosen: dict[str, Any]) -> None:
        self.fake, self.chosen = fake, chosen

    def first(self) -> str:
        self.fake.clock.now += self.fake.first(self.chosen)
        self.run()
        return self.fake.obstacle(self.chosen)

    def run(self) -> None:
        self.fake.clock.now += self.fake.seconds(self.chosen)

    def judge(self) -> Accuracy:
        error = self.fake.error(self.chosen)
        return Accuracy(error=error, largest_error=error, same_bits=error == 0)


def searched(fake: Fake, *options: Option, base: Plan | None = None, **limits: Any) -> InferenceSearch:
    bounds = Limits(**{"seconds": 1000.0, **limits})
    search = InferenceSearch(fake, base or Plan(), options, bounds, clock=fake.clock)
    search.run()
    return search


def outcomes(search: InferenceSearch) -> list[tuple[str, str]]:
    return [(trial.label, trial.outcome) for trial in search.state.trials]


def not_tried(search: InferenceSearch) -> list[tuple[str, str]]:
    return [(entry.label, entry.reason) for entry in search.state.not_tried]


def halved_by(*names: str) -> Callable[[dict[str, Any]], float]:
    return lambda chosen: 0.2 * 0.5 ** sum(name in chosen for name in names)


def test_what_is_faster_is_kept_and_what_is_not_is_dropped() -> None:
    search = searched(Fake(halved_by("precision")), FOLDED, BF16)
    assert outcomes(search) == [("folded", "dropped"), ("bf16", "kept"), ("folded", "dropped")]
    kept = search.state.trials[1]
    assert kept.baseline_seconds == pytest.approx(0.02)
    assert kept.candidate_seconds == pytest.approx(0.01)
    assert kept.comparison is not None
    assert kept.comparison.ratio == pytest.approx(2.0)
    assert kept.notes == ("made up",)
    assert search.current.plan.choices() == {"precision": "bf16"}
    assert search.final is not None


def test_the_guard_goes_before_the_clock() -> None:
    fake = Fake(halved_by("precision"), error=lambda chosen: 0.2 if "precision" in chosen else 0.0)
    search = searched(fake, BF16)
    (trial,) = search.state.trials
    assert trial.outcome == "dropped"
    assert trial.reason == "not near enough to fp32: error 20.0% is above 5.0%"
    assert trial.comparison is None
    assert trial.accuracy is not None
    assert (search.state.kept, search.final) == ([], None)


def test_a_failure_is_a_dropped_trial_with_its_reason() -> None:
    def breaks(chosen: dict[str, Any]) -> float:
        if "compile" in chosen:
            raise RuntimeError("no compiler\nand a long story")
        if "precision" in chosen:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return 0.2

    search = searched(Fake(halved_by("threads"), first=breaks), COMPILED, BF16, ONE_THREAD)
    assert outcomes(search) == [("compile", "failed"), ("bf16", "failed"), ("threads 1", "kept")]
    assert search.state.trials[0].reason == "RuntimeError: no compiler"
    assert search.state.trials[1].reason.startswith("out of memory")


def test_a_plan_that_is_not_carried_out_is_not_timed() -> None:
    fake = Fake(halved_by("compile"), obstacle=lambda chosen: "went on without" if "compile" in chosen else "")
    (trial,) = searched(fake, COMPILED).state.trials
    assert (trial.outcome, trial.reason, trial.comparison) == ("dropped", "went on without", None)


def test_what_cannot_stand_beside_a_kept_choice_is_tried_in_its_place() -> None:
    def seconds(chosen: dict[str, Any]) -> float:
        return 0.05 if "compile" in chosen else 0.1 if "weights" in chosen else 0.2

    fake = Fake(seconds, obstacle=lambda chosen: "cannot compile int8" if {"weights", "compile"} <= set(chosen) else "")
    either = Option(label="compile", choices={"compile": "default"}, instead_of=("weights",))
    search = searched(fake, INT8, either)
    assert outcomes(search) == [("int8", "dropped"), ("compile", "dropped"), ("compile without weights", "kept")]
    assert search.state.trials[0].reason == "compile without weights took its place"
    assert search.current.plan.choices() == {"compile": "default"}


def test_exactness_bounds_what_is_tried_and_the_sample_has_the_last_word() -> None:
    search = searched(Fake(halved_by("precision", "threads")), BF16, ONE_THREAD, exactness="rounding")
    assert outcomes(search) == [("threads 1", "kept")]
    assert not_tried(search) == [("bf16", "it is reduced, and exactness is rounding")]
    wild = Fake(halved_by("threads"), error=lambda chosen: 0.01 if "threads" in chosen else 0.0)
    (trial,) = searched(wild, ONE_THREAD, exactness="rounding").state.trials
    assert (trial.outcome, trial.exactness) == ("dropped", "reduced")
    (trial,) = searched(wild, ONE_THREAD).state.trials
    assert (trial.outcome, trial.exactness) == ("kept", "reduced")


def test_break_even_decides() -> None:
    fake = Fake(halved_by("compile"), first=lambda chosen: 40.0 if "compile" in chosen else 0.0)
    (trial,) = searched(fake, COMPILED, items=20_000).state.trials
    assert trial.outcome == "kept"
    assert trial.startup_seconds == pytest.approx(40.0)
    assert trial.payoff == 4000
    assert trial.reason == "40 s to start, pays off after 4,000 items"
    (trial,) = searched(fake, COMPILED, items=3000).state.trials
    assert trial.outcome == "dropped"
    assert trial.reason == "40 s to start, pays off after 4,000 items, but there are 3,000"
    (trial,) = searched(fake, COMPILED).state.trials
    assert trial.outcome == "kept"
    assert "unknown" in trial.reason
    ((_, why),) = not_tried(searched(fake, COMPILED, items=100))
    assert why.endswith("too short to pay off")
    assert len(fake.made) == 7  # nothing was made for it


def test_what_replaces_a_choice_says_so() -> None:
    search = searched(
        Fake(lambda chosen: {"bf16": 0.1}.get(chosen.get("precision"), 0.05 if "weights" in chosen else 0.2)),
        BF16,
        INT8,
    )
    assert outcomes(search) == [("bf16", "dropped"), ("int8", "kept")]
    assert search.state.trials[0].reason == "int8 took its place"
    assert search.current.plan.choices() == {"weights": "int8"}


def test_the_users_own_choices_are_not_touched() -> None:
    search = searched(Fake(halved_by("precision", "weights")), BF16, INT8, base=Plan(precision="fp32"))
    assert [label for label, _ in not_tried(search)] == ["bf16", "int8"]
    assert search.current.plan.choices() == {"precision": "fp32"}


def test_a_second_look_at_what_did_not_help_the_slower_model() -> None:
    def seconds(chosen: dict[str, Any]) -> float:
        if "precision" not in chosen:
            return 0.2
        return 0.05 if "fold_batch_norm" in chosen else 0.1

    search = searched(Fake(seconds), FOLDED, BF16)
    assert outcomes(search) == [("folded", "dropped"), ("bf16", "kept"), ("folded", "kept")]
    assert search.state.trials[2].on_top_of == ("bf16",)


def test_two_that_help_only_together() -> None:
    def seconds(chosen: dict[str, Any]) -> float:
        return 0.08 if {"precision", "compile"} <= set(chosen) else 0.2

    search = searched(Fake(seconds), BF16, COMPILED)
    assert outcomes(search) == [("bf16", "dropped"), ("compile", "dropped"), ("bf16 + compile", "kept")]
    assert search.current.plan.choices() == {"precision": "bf16", "compile": "default"}


def test_what_a_later_choice_made_useless_goes() -> None:
    def seconds(chosen: dict[str, Any]) -> float:
        if "precision" in chosen:
            return 0.08 if "threads" in chosen else 0.05
        return 0.1 if "threads" in chosen else 0.2

    search = searched(Fake(seconds), ONE_THREAD, BF16)
    assert outcomes(search) == [("threads 1", "dropped"), ("bf16", "kept")]
    assert search.state.trials[0].reason.startswith("no longer helps with those kept after it: x1.6")
    assert search.current.plan.choices() == {"precision": "bf16"}


def test_the_budget_ends_it() -> None:
    search = searched(Fake(halved_by("precision")), FOLDED, BF16, seconds=2.0)
    assert outcomes(search) == [("folded", "dropped")]
    assert not_tried(search) == [("bf16", "not reached in the search's share of the budget of 2 s")]
    assert search.state.enough_seconds is not None


def test_what_is_far_slower_is_seen_at_once() -> None:
    fake = Fake(lambda chosen: 9.0 if "threads" in chosen else 0.2)
    (trial,) = searched(fake, ONE_THREAD).state.trials
    assert trial.outcome == "dropped"
    assert trial.reason == "far slower: 9 s for the sample instead of 200 ms"
    assert fake.clock.now < 30


def test_a_gain_that_cannot_be_shown_again_is_not_promised() -> None:
    fake = Fake(halved_by("precision"))
    search = InferenceSearch(fake, Plan(), [BF16], Limits(seconds=1000.0), clock=fake.clock)
    search._drop_redundant = lambda: setattr(fake, "seconds", lambda chosen: 0.2)  # type: ignore[method-assign]
    search.run()
    assert outcomes(search) == [("bf16", "dropped")]
    assert "the whole was not" in search.state.trials[0].reason
    assert (search.current.plan.choices(), search.final) == ({}, None)


def test_turns_are_as_many_as_a_decision_takes() -> None:
    clock = FakeClock()

    def taking(seconds: float) -> Callable[[], None]:
        return lambda: setattr(clock, "now", clock.now + seconds)

    found = in_turns(taking(5.0), taking(1.0), seconds=0.1, clock=clock)
    assert (found.comparison.verdict, found.comparison.pairs) == ("faster", 3)
    hopeless = in_turns(taking(1.0), taking(1.6), seconds=60, clock=clock)
    assert (hopeless.comparison.verdict, hopeless.comparison.pairs) == ("slower", 2)
    futile = in_turns(taking(1.0), taking(1.0), seconds=60, clock=clock)
    assert futile.comparison.pairs == 6
    brief = in_turns(taking(0.002), taking(0.001), seconds=60, clock=clock)
    assert brief.baseline_seconds == pytest.approx(0.002)
    assert brief.comparison.verdict == "faster"
