"""What `flatout.tune` returns, of a script and of a step: one class."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flatout.application.tune import TuneResult
from flatout.levers.cudnn_benchmark import CudnnBenchmark
from flatout.levers.lever import Choice
from flatout.machine.description import Machine
from flatout.plan import Plan
from flatout.script.entry import Target
from flatout.search.trial import NotTried
from flatout.statistics import Comparison
from flatout.tuning.fitting import Fit
from flatout.tuning.results import SearchState, StepSubject
from flatout.tuning.windows import Pairing

MACHINE = Machine.from_json(json.loads((Path(__file__).parents[1] / "recorded" / "machine_two_cores.json").read_text()))
SCRIPT = Target(path="train.py", arguments=("--lr", "1"))
STEP = StepSubject(model="MLP", batches=5)
FASTER = Comparison(ratio=1.5, low=1.4, high=1.6, confidence=0.95, pairs=8, verdict="faster")
FINAL = Pairing(comparison=FASTER, baseline_seconds=0.03, candidate_seconds=0.02, startup_seconds=None,
                baseline_medians=(0.03,) * 8, candidate_medians=(0.02,) * 8,
                peak_resident_bytes=(1 << 30, 3 << 30))  # fmt: skip


def result(subject: Target | StepSubject, state: SearchState, final: Pairing | None = None) -> TuneResult:
    return TuneResult(
        plan=Plan(),
        subject=subject,
        machine=MACHINE,
        state=state,
        proof=None,
        final=final,
        budget_seconds=60.0,
        seconds=9.0,
    )


@pytest.mark.parametrize("subject", [SCRIPT, STEP])
def test_where_nothing_was_kept_there_is_a_reason_instead_of_a_speedup(subject: Target | StepSubject) -> None:
    found = result(subject, SearchState())
    assert (found.speedup, found.reason, found.trials) == (None, "nothing helps here", ())
    assert "nothing helps here; the" in found.summary()
    late = SearchState(not_tried=[NotTried(label="compile", reason="no time", for_lack_of_time=True)])
    late.enough_seconds = 95.0
    assert result(subject, late).reason.endswith("with 1 not reached: try seconds=100 (about)")
    unmeasured = result(subject, SearchState(kept=[Choice(CudnnBenchmark(), True)]))
    assert unmeasured.speedup is None
    assert "their combination could not be measured" in unmeasured.reason
    assert unmeasured.reason in unmeasured.summary()


@pytest.mark.parametrize(("subject", "where"), [(SCRIPT, "fresh processes"), (STEP, "fresh copies")])
def test_what_was_kept_has_a_speedup_with_its_interval(subject: Target | StepSubject, where: str) -> None:
    found = result(subject, SearchState(kept=[Choice(CudnnBenchmark(), True)]), FINAL)
    assert found.speedup == FASTER
    assert found.reason == ""
    assert f"x1.50 ±0.10 (30 ms -> 20 ms, {where}, 8 window pairs)" in found.summary()
    assert "memory    peak of the process 1 GiB -> 3 GiB, of 23.5 GiB" in found.summary()
    document = json.loads(json.dumps(found.to_json()))
    assert document["speedup"]["low"] == 1.4
    assert document["final"]["peak_resident_bytes"] == [1 << 30, 3 << 30]
    assert document["measurement"]["samples_seconds"] == [0.02] * 8
    assert ("script" in document) is (subject is SCRIPT)


def test_a_plan_fits_where_no_limit_was_given_or_it_was_shown_to_be_within_it() -> None:
    assert result(SCRIPT, SearchState()).fits
    assert not result(SCRIPT, SearchState(fit=Fit(limit_bytes=10, plain_bytes=20))).fits
    assert result(SCRIPT, SearchState(fit=Fit(limit_bytes=10, plain_bytes=20, planned_bytes=9))).fits
