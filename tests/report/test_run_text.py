"""What is written of a run, and what `flatout compare` makes of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flatout.diagnose.run_summary import RunSummary
from flatout.machine.description import Machine
from flatout.plan import Plan
from flatout.report.compare import compare_sides, comparison_text
from flatout.report.run_text import run_document, run_text
from flatout.script.process_record import ProcessRecord, own_seconds
from flatout.script.runner import RunRecord
from flatout.timing import Load

MACHINE = json.loads((Path(__file__).parents[1] / "recorded" / "machine_two_cores.json").read_text())
ALONE = Load(own_cores=1.9, others_cores=0.02, logical_cores=2)
CROWDED = Load(own_cores=1.0, others_cores=1.0, logical_cores=2)


def summary(load: Load | None, seconds: float = 0.01) -> RunSummary:
    record = RunRecord(steps=40, samples=[seconds * (1 + 0.001 * (number % 5)) for number in range(40)])
    return RunSummary(
        name="train.py",
        arguments=(),
        status=0,
        wall_seconds=1.0,
        cpu_seconds=1.0,
        peak_resident_bytes=1 << 30,
        record=record,
        observed=None,
        machine=Machine.from_json(MACHINE),
        plan=None,
        applied=("threads 1",),
        rolled_back=(("torch.compile", "it failed"),),
        left_off=(("bf16 autocast", "the script sets it"),),
        plan_notes=("left off: bf16 autocast (the script sets it)",),
        findings=(),
        load=load,
    )


def test_a_run_beside_others_is_called_contended_by_the_screen_and_by_compare() -> None:
    said = "contended: others kept 1.0 of 2 cores busy, none was idle"
    assert said in run_text(summary(CROWDED), None)
    assert "contended" not in run_text(summary(ALONE), None)
    first, second = run_document(summary(ALONE)), run_document(summary(CROWDED, seconds=0.02))
    assert second["load"] == {"own_cores": 1.0, "others_cores": 1.0, "logical_cores": 2}
    found = compare_sides([first], [second])
    assert found.comparison.verdict == "not significant"
    assert f"second: {said}" in found.caveats
    assert "others competed for the processor in the second" in comparison_text(found)
    alone = compare_sides([first], [run_document(summary(ALONE, seconds=0.02))])
    assert alone.comparison.verdict == "slower"


def test_a_plan_that_keeps_nothing_is_not_called_no_plan() -> None:
    def plan_row(**changes: Any) -> str:
        rows = run_text(replace(summary(None), applied=(), plan_notes=(), **changes), None).splitlines()
        return next(row for row in rows if row.startswith("plan "))

    assert plan_row(plan=None) == "plan      none: the script ran as it is"
    assert plan_row(plan=Plan()) == "plan      it keeps nothing: the script ran as it is"
    assert plan_row(plan=Plan(threads=1)) == "plan      nothing of it was applied: the script ran as it is"


def test_a_run_too_short_to_tell_says_nothing_of_others() -> None:
    document = run_document(summary(None))
    assert document["load"] is None
    assert document["measurement"]["contended"] is None


def test_samples_and_tokens_a_second_or_why_they_are_unknown() -> None:
    known = replace(summary(ALONE), samples_per_step=32, tokens_per_step=4096)
    assert "40 steps, median 10 ms, 3,194 samples/s, 408,782 tokens/s" in run_text(known, None)
    document = run_document(replace(summary(ALONE), samples_reasons={"samples_per_step": "unknown, because"}))
    assert (document["samples_per_step"], document["tokens_per_step"]) == (None, None)
    assert document["samples_unknown_because"] == {"samples_per_step": "unknown, because"}


def test_a_share_of_the_ceiling_is_the_same_on_the_screen_and_in_the_document() -> None:
    machine = Machine.from_json(MACHINE)
    assert machine.ceilings is not None
    name, peak = machine.ceilings.best_gemm() or pytest.fail("no product was measured")
    seen = summary(ALONE)
    seen.record.flops_per_step = 0.25 * peak.value * 0.01002
    document = run_document(seen)
    assert document["ceiling_share"] == pytest.approx(0.25)
    assert str(document["ceiling"]).startswith(f"{name} ceiling (")
    assert f"ceiling   25% of the {document['ceiling']}" in run_text(seen, None)
    unknown = run_document(summary(ALONE))
    assert unknown["ceiling_share"] is None
    assert unknown["ceiling"] == f"unknown: {unknown['flops_unknown_because']}"


def test_processors_that_other_processes_of_the_script_kept_busy_are_counted() -> None:
    assert "memory    1 GiB at most; CPU 1.0 cores busy" in run_text(summary(ALONE), None)
    text = run_text(replace(summary(ALONE), children_cpu_seconds=2.5), None)
    assert "memory    1 GiB at most in the script's own process; CPU 3.5 cores busy, 2.5 of them with" in text


def test_what_is_not_applied_of_a_plan_is_in_the_document_with_its_reason() -> None:
    document = run_document(summary(ALONE))
    assert document["applied"] == ["threads 1"]
    assert document["left_off"] == [{"label": "bf16 autocast", "reason": "the script sets it"}]
    assert document["rolled_back"] == [{"label": "torch.compile", "reason": "it failed"}]


def rank(number: int, **changes: Any) -> ProcessRecord:
    parts = {"data": 0.001 * (number + 1), "forward": 0.001, "backward": 0.002, "optimizer": 0.0005}
    common: dict[str, Any] = {"steps": 1200, "step_seconds": 0.0055, "parts": parts, "ended": True, **changes}
    return ProcessRecord(
        pid=40 + number, rank=number, started_at=float(number), device="cpu", peak_resident_bytes=3 << 20, **common
    )


def test_processes_that_the_script_started_have_a_row_each() -> None:
    two = (rank(0), rank(1, ended=False))
    seen = replace(summary(ALONE), record=RunRecord(), processes=two)
    text = run_text(seen, None)
    assert "training in 2 processes that it started" in text
    assert "no training step found" not in text
    lines = text[text.index("ranks") :].splitlines()
    heads = ["ranks", "steps", "step", "data", "forward", "backward", "optimizer", "waits", "memory"]
    assert lines[0].split() == heads
    assert " ".join(lines[1].split()) == "rank 0 1,200 5.5 ms 1 ms 1 ms 2 ms 500 µs - 3 MiB"
    assert lines[2].endswith("3 MiB  (not completed: it was killed, or still runs)")
    assert lines[3].strip() == "slowest: rank 1, 3.5 ms of a step outside backward; fastest: rank 0, 2.5 ms"
    found = run_document(seen)
    assert [one["rank"] for one in found["processes"]] == [0, 1]  # type: ignore[attr-defined]
    assert "processes" not in run_document(summary(ALONE))


def test_what_ranks_wait_for_is_said_with_the_rank_and_the_part() -> None:
    waits = (
        {"data": 0.001, "forward": 0.002, "communication": 0.006},
        {"data": 0.005, "forward": 0.002, "communication": 1e-3},
    )
    two = tuple(
        rank(
            number,
            parts=parts,
            ranks=2,
            exposed_seconds=parts["communication"],
            own_error_seconds=1e-5,
            busy_share=0.5,
            own_typical_seconds=own_seconds(parts),
        )
        for number, parts in enumerate(waits)
    )
    seen = replace(summary(ALONE), record=RunRecord(), processes=two)
    text = " ".join(run_text(seen, None).split())
    assert "communication that nothing overlaps: 1 ms of a step (18%) the others" in text
    assert "the others wait for rank 1: 4 ms of a step (73%) 4 ms more than the others in: waiting for data" in text
    assert "slowest:" not in text  # the same once more
    balance: Any = run_document(seen)["rank_balance"]
    assert (balance["straggler"], balance["part"], balance["certain"]) == ("rank 1", "data", True)
    turns_of = [tuple((step, 0.001 if step % 2 == late else 0.009) for step in range(9)) for late in range(2)]
    turns = tuple(replace(one, step_waits=found) for one, found in zip(two, turns_of, strict=True))
    turns = tuple(replace(one, exposed_seconds=0.005) for one in turns)
    text = run_text(replace(seen, processes=turns), None)
    assert "1 ms of a step (18%); 4 ms more, as now one rank is late, now another (73%)" in text
    unknown = tuple(replace(one, exposed_seconds=None, exposed_unknown_because="unknown, because") for one in two)
    seen = replace(seen, processes=unknown)
    assert "waits for other ranks: unknown, because" in run_text(seen, None)
    assert run_document(seen)["rank_balance"] is None
    assert run_document(seen)["rank_balance_unknown_because"] == "unknown, because"


def test_names_and_errors_of_a_script_do_not_drive_the_terminal() -> None:
    hostile = "a\x1b[2Jb\x9b31m\n"
    shown = run_text(replace(summary(ALONE), name=hostile, plan_notes=(hostile,), applied=(hostile,)), hostile)
    assert all(line.isprintable() for line in shown.split("\n"))
    assert len(shown.split("\n")) == len(run_text(replace(summary(ALONE), plan_notes=("a",)), "b").split("\n"))
