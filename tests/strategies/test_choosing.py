"""What is predicted, in which order strategies are tried, and what is chosen, with trials that are stood in."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flatout.application.choose_parallel import ParallelChoice, choose_parallel
from flatout.errors import ScriptError, UsageError
from flatout.machine.description import Machine
from flatout.plan import Plan
from flatout.report.document import to_text
from flatout.report.strategies_text import strategies_document, strategies_text
from flatout.script.trial.answers import TrialEnded
from flatout.search.deadline import BudgetSpent, Deadline
from flatout.statistics import Comparison
from flatout.strategies import choosing
from flatout.strategies.choosing import StrategiesRequest, choose_strategy
from flatout.strategies.facts import ALONE, STRATEGIES, Memory, TrainingFacts
from flatout.strategies.found import StrategiesFound, StrategyProof
from flatout.strategies.prediction import group_of, predictions
from flatout.strategies.proving import Run, judged
from flatout.strategies.sides import Way
from flatout.tuning.devices.ranks_trial import RanksRefused
from flatout.tuning.short_budget import budget_option
from flatout.tuning.windows import Pairing

MACHINE = Machine.from_json(json.loads((Path(__file__).parents[1] / "recorded" / "machine_two_cores.json").read_text()))
MIB = 1 << 20
FACTS = TrainingFacts(
    model="Net",
    parameters=1_000_000,
    parameter_bytes=4_000_000,
    blocks=4,
    block_parameters=800_000,
    samples=32,
    device="cpu",
    batch_norms=0,
    memory={ALONE: Memory(bytes=100 * MIB), **{name: Memory(bytes=60 * MIB) for name in STRATEGIES}},
    all_reduced_bytes={},
    step_seconds=0.1,
    rank_step_seconds=0.14,
)
POINTS = {"all_reduce": [(size, 2e-4 + size / 1e9) for size in (1000, 100_000, 1_000_000, 8_000_000)]}
PROOF = StrategyProof(
    verdict="equal to rounding", reason="", steps=30, loss_difference=1e-7, rounding_loss_difference=2e-7
)


# predictions


def test_the_link_between_ranks_follows_from_what_an_all_reduce_takes() -> None:
    group = group_of(POINTS, 2)
    assert group is not None
    assert group.all_reduce_seconds(2_000_000) == pytest.approx(2e-4 + 2e-3, rel=0.01)
    assert group_of({}, 2) is None


def test_a_step_is_a_share_of_the_compute_and_what_is_exchanged() -> None:
    found = predictions(FACTS, group_of(POINTS, 2), 2, 8)
    assert found["ddp"].step_seconds == pytest.approx(0.07 + 2e-4 + 4e-3, rel=0.01)
    assert found["zero1"].step_seconds > found["ddp"].step_seconds
    assert found["pipeline"].step_seconds == pytest.approx(0.07 * 9 / 8)
    assert "tensor" not in found
    assert predictions(FACTS, None, 2, None) == {}
    assert predictions(replace(FACTS, rank_step_seconds=None), group_of(POINTS, 2), 2, 8) == {}


def test_layers_that_ranks_share_wait_for_each_all_reduce() -> None:
    facts = replace(FACTS, all_reduced_bytes={"tensor": (1_000_000,) * 8, "fsdp+tensor": (500_000,) * 8})
    two, four = (predictions(facts, group_of(POINTS, ranks), ranks, 8) for ranks in (2, 4))
    assert two["tensor"].step_seconds == pytest.approx(0.07 + 8 * (2e-4 + 1e-3), rel=0.01)
    # of four ranks each all_reduce is between two, over a link as fast as was measured between all
    link = group_of(POINTS, 4).link
    each = 2 * (link.latency_seconds + 500_000 / 2 / link.bytes_per_second)
    assert 0.035 + 8 * each < four["fsdp+tensor"].step_seconds < 0.035 + 8 * each + 4e-3
    assert "0% hidden" in two["tensor"].reason


def test_a_batch_that_the_ranks_cannot_share_equally_is_not_predicted() -> None:
    assert [*predictions(replace(FACTS, samples=31), group_of(POINTS, 2), 2, 8)] == ["pipeline"]


# the choice

Choose = Callable[..., StrategiesFound]


def pairing(ratio: float) -> Pairing:
    verdict: Any = "faster" if ratio > 1.1 else "slower" if ratio < 0.9 else "not significant"
    reason = "the interval includes no change" if verdict == "not significant" else None
    found = Comparison(
        ratio=ratio, low=ratio - 0.05, high=ratio + 0.05, confidence=0.95, pairs=8, verdict=verdict, reason=reason
    )
    return Pairing(comparison=found, baseline_seconds=0.1, candidate_seconds=0.1 / ratio, startup_seconds=None)


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Choose:
    """`choose(trials, ...)`: trials: strategy -> the ratio that a trial shows, or what it raises."""

    def choose(
        trials: dict[str, Any],
        *,
        finals: dict[str, float] | None = None,
        proof: Any = PROOF,
        facts: TrainingFacts = FACTS,
        plan: Plan | None = None,
        budget_seconds: float = 1000.0,
        tried: list[tuple[str, str]] | None = None,
    ) -> StrategiesFound:
        def timed(self: Any, baseline: Way, way: Way) -> tuple[Pairing, int]:
            if tried is not None:
                tried.append((baseline.plan.parallel or ALONE, str(way.plan.parallel)))
            found = trials[str(way.plan.parallel)]
            if isinstance(found, BaseException):
                raise found
            return pairing(found), 50 * MIB

        def final(sides: Any, *_: Any) -> Pairing:
            return pairing((finals or trials)[sides.other.plan.parallel])

        def proved(*_: Any) -> Any:
            if isinstance(proof, BaseException):
                raise proof
            return proof

        class Started:
            def __enter__(self) -> None: ...
            def __exit__(self, *_: object) -> None: ...

        monkeypatch.setattr(choosing._Choosing, "_found_facts", lambda self: facts)
        monkeypatch.setattr(choosing._Choosing, "_collectives", lambda self: POINTS)
        monkeypatch.setattr(choosing._Choosing, "_timed", timed)
        monkeypatch.setattr(choosing, "compare_afresh", final)
        monkeypatch.setattr(choosing, "proved", proved)
        monkeypatch.setattr(Way, "started", lambda self: Started())
        request = StrategiesRequest(spec="net.py:make", ranks=2, plan=plan or Plan(), budget_seconds=budget_seconds)
        return choose_strategy(request, MACHINE, lambda text: None, Deadline(budget_seconds))

    return choose


def outcomes(found: StrategiesFound) -> dict[str, str]:
    return {one.strategy: one.outcome for one in found.trials}


ALL = {"ddp": 1.5, "zero1": 1.3, "fsdp": 1.0, "tensor": 0.5, "pipeline": 0.7}


def test_the_fastest_that_is_proved_is_chosen(choose: Choose) -> None:
    tried: list[tuple[str, str]] = []
    found = choose(ALL, tried=tried)
    assert found.chosen == "ddp"
    assert outcomes(found) == {
        "ddp": "kept",
        "zero1": "dropped",
        "fsdp": "dropped",
        "tensor": "dropped",
        "pipeline": "dropped",
    }
    assert tried == [(ALONE, name) for name in ("fsdp", "ddp", "zero1", "pipeline", "tensor")]
    assert (found.plan.parallel, found.plan.speedup) == ("ddp", 1.5)
    assert (
        found.plan.reasons["parallel"] == "2 ranks: x1.50 here over one process; trains as one over 30 steps; rounding"
    )
    text = strategies_text(found, MACHINE, budget_option)
    assert "net.py:make: Net with 1,000,000 parameters, batches of 32; one process takes 100 ms a step" in text
    assert "compute 70 ms" in text
    assert "kept        ddp         100 ms -> 66.7 ms  x1.50 ±0.05  50 MiB a rank" in text
    assert "dropped     zero1       100 ms -> 76.9 ms  x1.30 ±0.05  50 MiB a rank  slower than ddp" in text
    assert "x1.50 ±0.05: ddp on 2 ranks over one process (100 ms -> 66.7 ms a step of the same batch" in text
    assert "equal to rounding: 30 steps of 2 ranks train as one process" in text


def test_the_document_is_json(choose: Choose) -> None:
    found = choose(ALL)
    document = json.loads(to_text(strategies_document(found, MACHINE)))
    assert (document["chosen"], document["plan"]) == ("ddp", {"parallel": "ddp"})
    assert document["facts"]["memory"]["ddp"]["bytes"] == 60 * MIB
    shown = ParallelChoice(machine=MACHINE, **vars(found))
    assert shown.summary() in str(shown)
    assert shown.to_json()["chosen"] == "ddp"


def test_one_process_stays_where_nothing_is_faster(choose: Choose) -> None:
    found = choose(dict.fromkeys(STRATEGIES, 0.6))
    assert (found.chosen, found.reason, found.plan, found.speedup) == (None, "one process is faster here", Plan(), None)
    assert "result    one process is faster here" in strategies_text(found, MACHINE, budget_option)


def test_what_is_not_confirmed_or_not_proved_gives_way_to_the_next(choose: Choose) -> None:
    found = choose(ALL, finals={"ddp": 1.02, "zero1": 1.3})
    assert found.chosen == "zero1"
    assert found.trials[0].reason == "faster in the trial, in new processes not confirmed: x1.02 (0.97 to 1.07)"
    different = replace(PROOF, verdict="different", reason="losses differ by 1e-02")
    found = choose(ALL, proof=different)
    assert found.chosen is None
    assert found.trials[0].reason == "x1.50 in new processes, but not proved: different: losses differ by 1e-02"
    assert found.reason == "one process: no strategy was shown to be faster and right"
    failed = choose(ALL, proof=ScriptError("net.py:make failed in 2 ranks"))
    assert "not proved: net.py:make failed in 2 ranks" in failed.trials[0].reason


def test_one_process_has_as_few_threads_as_a_rank_where_it_is_faster_so(choose: Choose) -> None:
    """Threads that compete with other work on the machine would make any strategy look good."""
    busy = replace(FACTS, step_seconds=0.68, rank_step_seconds=0.02, threads=2, rank_threads=1)
    found = choose(dict.fromkeys(STRATEGIES, 0.6), facts=busy)
    assert found.warnings[0].startswith(
        "one process takes 20 ms a step with 1 thread instead of 2, and 680 ms as it is"
    )
    assert found.plan.choices() == {}
    text = strategies_text(found, MACHINE, budget_option)
    assert "one process takes 680 ms a step with 2 threads" in text
    assert "with 1 thread a rank" in text
    given = choose(dict.fromkeys(STRATEGIES, 0.6), facts=busy, plan=Plan(threads=2))
    assert given.warnings == ()


def test_batch_norms_are_timed_and_not_chosen(choose: Choose) -> None:
    found = choose(ALL, facts=replace(FACTS, batch_norms=2))
    assert found.chosen is None
    assert "batch norms see a rank's share" in found.trials[0].reason


def test_refusals_failures_and_what_does_not_fit_are_told_apart(choose: Choose) -> None:
    large = {**FACTS.memory, "fsdp": Memory(bytes=1 << 50)}
    trials = {
        **ALL,
        "ddp": RanksRefused("0 is a batch norm", limit="l", remedy="r"),
        "zero1": TrialEnded(1, "Traceback (most recent call last):\n  x\nKeyError: 'a'", 0),
    }
    found = choose(trials, facts=replace(FACTS, memory=large))
    assert outcomes(found) == {
        "ddp": "refused",
        "zero1": "failed",
        "fsdp": "refused",
        "tensor": "dropped",
        "pipeline": "dropped",
    }
    reasons = {one.strategy: one.reason for one in found.trials}
    assert reasons["ddp"] == "0 is a batch norm; l; r"
    assert reasons["zero1"] == "KeyError: 'a'"
    assert reasons["fsdp"].startswith("a rank takes 1 PiB (forecast), and has ")
    planned = choose(ALL, plan=Plan(optimizer_in_backward=True))
    assert outcomes(planned)["fsdp"] == "refused"
    assert "it needs whole parameters" in planned.trials[2].reason


def test_where_one_process_does_not_fit_the_first_strategy_takes_its_place(choose: Choose) -> None:
    tried: list[tuple[str, str]] = []
    large = replace(FACTS, step_seconds=None, rank_step_seconds=None)
    found = choose({**ALL, "fsdp": 1.4}, facts=large, tried=tried)
    assert {baseline for baseline, _ in tried} == {"ddp"}
    assert (found.baseline, found.chosen, found.proof, found.plan.speedup) == ("ddp", "fsdp", None, None)
    assert found.speedup is None
    assert found.trials[0].reason == "slower than fsdp"
    assert "one process does not fit" in found.plan.reasons["parallel"]
    alone = choose(dict.fromkeys(STRATEGIES, 0.8), facts=large)
    assert alone.chosen == "ddp"
    text = strategies_text(alone, MACHINE, budget_option)
    assert "it does not fit into one process" in text
    assert "ddp on 2 ranks: one process does not fit, and no other strategy was faster" in text


def test_without_time_nothing_is_claimed(choose: Choose) -> None:
    found = choose(ALL, budget_seconds=5.0)
    assert set(outcomes(found).values()) == {"not reached"}
    assert found.enough_seconds is not None
    assert found.reason == "one process: no strategy could be tried (not reached)"
    assert "not all were reached: try --budget" in strategies_text(found, MACHINE, budget_option)


def test_the_end_of_the_budget_keeps_what_was_tried(choose: Choose) -> None:
    found = choose({**ALL, "ddp": BudgetSpent(None)})
    assert outcomes(found) == {
        "fsdp": "dropped",
        **dict.fromkeys(("ddp", "zero1", "tensor", "pipeline"), "not reached"),
    }


# the proof


def run(losses: list[float], weight: float) -> Run:
    return Run(losses=tuple(losses), weights={"w": torch.tensor([1.0, weight])})


def test_ranks_train_as_one_process_within_a_small_multiple_of_rounding() -> None:
    plain, nudged = run([2.0, 1.0], 0.5), [run([2.0, 1.001], 0.5), run([2.0, 1.0], 0.501)]
    assert judged(plain, nudged, run([2.0, 1.002], 0.502)).verdict == "equal to rounding"
    assert judged(plain, nudged, plain).verdict == "equal to rounding"
    wrong = judged(plain, nudged, run([2.0, 1.01], 0.5))
    assert (wrong.verdict, wrong.reason) == (
        "different",
        "losses differ by 5.0e-03, and one rounding error explains 5.0e-04",
    )
    assert judged(plain, nudged, run([2.0, 1.0], 0.6)).reason.startswith("weights differ by 1.0e-01")


def test_a_difference_below_all_rounding_is_none() -> None:
    plain = run([2.0, 1.0], 0.5)
    assert judged(plain, [plain], run([2.0, 1.0 + 1e-7], 0.5)).verdict == "equal to rounding"


def test_a_training_that_one_rounding_error_changes_proves_nothing() -> None:
    plain, nudged = run([2.0, 1.0], 0.5), run([2.0, 1.5], 0.5)
    found = judged(plain, [nudged], plain)
    assert (found.verdict, found.reason) == (
        "not comparable",
        "one rounding error changes losses by 25% and weights by 0%",
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_prove_nothing(value: float) -> None:
    plain = run([2.0, 1.0], 0.5)
    assert judged(plain, [plain], run([2.0, value], 0.5)).verdict == "different"
    assert judged(run([2.0, value], 0.5), [run([2.0, value], 0.5)], plain).verdict == "not comparable"
    assert (
        judged(plain, [plain], run([2.0], 0.5)).reason
        == "other weights, or another number of steps, than in one process"
    )


# what is asked


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"training": 3}, "training is 3"),
        ({"ranks": 0}, "ranks is 0"),
        ({"ranks": 1}, "one rank; there is nothing to share"),
        ({"ranks": "many"}, "ranks"),
        ({"plan": Plan(parallel="ddp")}, "the plan has parallel = 'ddp'"),
        ({"plan": "flatout.toml"}, "plan is"),
        ({"seconds": -1}, "seconds is -1"),
    ],
)
def test_what_is_asked_is_checked_before_anything_runs(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        choose_parallel(**{"training": "net.py:make", "ranks": 2, **arguments})
