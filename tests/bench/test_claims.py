"""The guides' claims: what is measured for them, and what follows from it."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from flatout.bench import claims
from flatout.bench.claim import Case, Claim, ClaimResult, ClaimsResult
from flatout.bench.claim_steps import MODELS, exactly, once_seconds, peak_bytes, training_step
from flatout.bench.claims import CLAIMS, measure_claims
from flatout.bench.results import Speedup
from flatout.bench.system_measures import in_two_processes
from flatout.bench.training_measures import checkpointing_memory
from flatout.bench.workload import Prepared, Settings, Setup
from flatout.errors import TrialError
from flatout.machine.description import Machine
from flatout.report.bench_text import claims_text

MACHINE = Machine.from_json(json.loads((Path(__file__).parents[1] / "recorded/machine_two_cores.json").read_text()))
CPU = Setup(device="cpu", quick=True)


def judged(*measured: Speedup, low: float = 1.2, high: float | None = None, **changed: Any) -> ClaimResult:
    cases = tuple(Case(condition=f"case {number}", measured=one) for number, one in enumerate(measured))
    given: dict[str, Any] = {"quantity": "speedup", "unit": "", "cases": cases, **changed}
    return ClaimResult(key="claim", says="it helps", guides=("A guide",), low=low, high=high, **given)


def about(ratio: float, width: float = 0.02) -> Speedup:
    return Speedup(ratio=ratio, low=ratio - width, high=ratio + width, pairs=12)


def test_a_claim_holds_where_what_was_measured_reaches_its_range() -> None:
    assert judged(about(1.3)).verdict == "holds"
    assert judged(about(1.1), about(1.3)).verdict == "holds in part"
    assert judged(about(1.3), about(1.19)).verdict == "holds in part"
    assert judged(about(1.19), about(0.8)).verdict == "undecided"  # the interval of the first has 1.2
    assert judged(about(0.8)).verdict == "does not hold"
    assert judged(exactly(1.1)).verdict == "does not hold"
    assert judged(exactly(1.2)).verdict == "holds"
    assert judged().verdict == "not measurable here"


def test_more_than_was_stated_is_said() -> None:
    claim = judged(about(1.3), about(2.0), about(1.39), about(1.1), high=1.4)
    assert [claim.answer(case) for case in claim.cases] == ["yes", "more", "yes", "no"]
    unbounded = judged(about(9.0))
    assert unbounded.answer(unbounded.cases[0]) == "yes"


def test_every_claim_can_be_judged() -> None:
    assert len({claim.key for claim in CLAIMS}) == len(CLAIMS) >= 15
    for claim in CLAIMS:
        assert claim.guides
        assert claim.high is None or claim.high > claim.low > 0
        assert (claim.measure is None) == bool(claim.why_not)
        assert claim.unit or claim.quantity != "rate"


def measure(monkeypatch: pytest.MonkeyPatch, *given: Claim) -> ClaimsResult:
    monkeypatch.setattr(claims, "machine_with_ceilings", lambda progress: MACHINE)
    monkeypatch.setattr(claims, "in_child", lambda function, *arguments: function(*arguments))
    return measure_claims(given, CPU, 0.1, lambda text: None)


def claim(key: str, **changed: Any) -> Claim:
    given: dict[str, Any] = {"quantity": "speedup", "low": 1.2, "guides": ("A lesson",), **changed}
    return Claim(key=key, says=f"{key} helps", **given)


def test_claims_that_are_measured_alike_share_the_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def once(setup: Setup, seconds: float) -> Sequence[Case]:
        calls.append(seconds)
        return [Case(condition="a case", measured=about(1.25), note="a note")]

    def failing(setup: Setup, seconds: float) -> Sequence[Case]:
        raise TrialError("ValueError: broken")

    found = measure(
        monkeypatch,
        claim("a", measure=once),
        claim("b", measure=once, low=1.8),
        claim("c", measure=failing),
        claim("d", measure=once, packages=("a_package_that_is_not_there",)),
        claim("e", why_not="no figure"),
    )
    assert calls == [0.1]
    verdicts = ["holds", "does not hold", *["not measurable here"] * 3]
    assert [one.verdict for one in found.claims] == verdicts
    reasons = ["it failed: ValueError: broken", "a_package_that_is_not_there is not installed", "no figure"]
    assert [one.reason for one in found.claims[2:]] == reasons
    text = claims_text(found)
    assert "yes                 x1.25 (1.23 to 1.27)  a case (a note)" in text
    assert text.endswith("5 claims: 1 hold, 1 do not hold, 3 cannot be measured here")
    again = ClaimsResult.from_json(json.loads(json.dumps(found.to_json())))
    assert again.claims == found.claims


@pytest.mark.skipif("__import__('torch').cuda.is_available()", reason="a GPU is here")
def test_without_a_gpu_its_claims_say_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measure(monkeypatch, *(one for one in CLAIMS if one.needs))
    assert {one.reason for one in found.claims} == {
        "it needs a GPU, and torch sees none",
        "it needs two GPUs, and torch sees 0",
    }


def test_a_call_ends_when_the_gpu_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr("torch.cuda.synchronize", lambda: done.append("waited"))
    assert once_seconds(lambda: done.append("called"), CPU) >= 0
    assert once_seconds(lambda: done.append("called"), Setup(device="cuda")) >= 0
    assert done == ["called", "called", "waited"]


def test_memory_is_that_of_tensors_in_a_step() -> None:
    (case,) = checkpointing_memory(CPU, 0.0)
    assert case.measured.ratio > 1.5
    step = training_step(MODELS["MLP 784-1024-1024-10"], CPU)
    gradients = 4 * (785 * 1024 + 1025 * 1024 + 1025 * 10)
    assert gradients < peak_bytes(step, CPU) < 8 * gradients  # AdamW makes some tensors of its own


def turns_that_show_the_setting(setup: Setup, settings: Settings) -> Prepared:
    return Prepared(turn=lambda: time.sleep(0.0 if settings["it"] else 0.02), how="")


@pytest.mark.slow
def test_what_cannot_be_changed_in_a_process_is_compared_between_two() -> None:
    assert in_two_processes(turns_that_show_the_setting, {}, "it", CPU, 0.05).ratio > 2
