"""Which rank the others wait for: by the work of its own, and only where they do wait."""

from __future__ import annotations

from typing import Any

import pytest

from flatout.script.process_record import ProcessRecord, own_error_seconds, own_seconds, own_typical_seconds, step_waits
from flatout.script.rank_balance import balance_unknown_because, rank_balance
from flatout.script.spans import StepRow


def rank(number: int, communication: float, data: float, **changes: Any) -> ProcessRecord:
    parts = {"data": data, "forward": 0.01, "communication": communication, "evaluation": 1.0}
    common: dict[str, Any] = {
        "pid": number,
        "rank": number,
        "ranks": 3,
        "started_at": float(number),
        "steps": 9,
        "step_seconds": 0.02,
        "parts": parts,
        "exposed_seconds": communication,
        "own_error_seconds": 1e-4,
        "own_typical_seconds": data + 0.01,
        "busy_share": 0.5,
        "device": "cpu",
        "peak_resident_bytes": 1,
    }
    return ProcessRecord(**common | changes)


THREE = (rank(0, 0.009, 0.001), rank(1, 0.002, 0.008), rank(2, 0.008, 0.002))


def test_the_straggler_its_part_and_what_it_costs() -> None:
    found = rank_balance(THREE)
    assert found is not None
    assert (found.straggler, found.part, found.certain) == ("rank 1", "data", True)
    assert found.excess_seconds == pytest.approx(0.006)  # above the next slowest: what a step would gain
    assert found.part_excess_seconds == pytest.approx(0.0065)
    assert found.waited_seconds == pytest.approx(0.0065)
    assert found.exposed_seconds == pytest.approx(0.002)
    assert found.imbalance == pytest.approx(0.018 / ((0.011 + 0.018 + 0.012) / 3))
    assert found.to_json()["excess_seconds"] == found.excess_seconds


def test_ranks_that_are_late_in_turns_are_told_from_communication() -> None:
    """Both wait 5 ms on average, but in each step one of them waits 1 ms only."""
    turns = [tuple((step, 0.001 if step % 2 == late else 0.009) for step in range(10, 20)) for late in range(2)]
    ranks = [rank(number, 0.005, 0.005, step_waits=waits) for number, waits in enumerate(turns)]
    found = rank_balance(ranks)
    assert found is not None
    assert found.exposed_seconds == pytest.approx(0.001)
    assert found.turns_seconds == pytest.approx(0.004)
    others = rank(1, 0.005, 0.005, step_waits=tuple((step, 0.001) for step in range(90, 99)))
    found = rank_balance([ranks[0], others])
    assert found is not None
    assert (found.exposed_seconds, found.turns_seconds) == (0.005, None)  # not watched in the same steps


def test_a_slower_rank_that_nobody_waits_for_is_no_straggler() -> None:
    found = rank_balance((rank(0, 0.002, 0.001), rank(1, 0.002, 0.008)))
    assert found is not None
    assert not found.certain


def test_an_excess_within_the_scatter_is_not_certain() -> None:
    doubtful = [rank(place, one.parts["communication"], one.parts["data"]) for place, one in enumerate(THREE)]
    for error in (0.01, None):
        found = rank_balance([*doubtful[:1], rank(1, 0.002, 0.008, own_error_seconds=error), doubtful[2]])
        assert found is not None
        assert not found.certain


def test_a_few_disturbed_steps_make_no_straggler() -> None:
    found = rank_balance([THREE[0], rank(1, 0.002, 0.008, own_typical_seconds=0.0125), THREE[2]])
    assert found is not None
    assert not found.certain


def test_where_no_core_is_idle_a_few_milliseconds_make_no_straggler() -> None:
    for busy, excess, certain in ((0.5, 0.002, True), (0.97, 0.002, False), (0.97, 0.008, True)):
        ranks = (rank(0, 0.002 + excess, 0.001), rank(1, 0.002, 0.001 + excess, busy_share=busy))
        found = rank_balance(ranks)
        assert found is not None
        assert found.certain == certain


def test_what_is_not_known_of_one_rank_is_not_known_of_all() -> None:
    hidden = rank(3, 0.0, 0.0, exposed_seconds=None, exposed_unknown_because="unknown, because it compiles")
    assert rank_balance([*THREE, hidden]) is None
    assert balance_unknown_because([*THREE, hidden]) == "unknown, because it compiles"
    assert balance_unknown_because(THREE) == ""
    assert rank_balance([rank(0, 0.0, 0.0, ranks=None), rank(1, 0.0, 0.0, ranks=None)]) is None  # they train apart
    assert balance_unknown_because([rank(0, 0.0, 0.0)]) == ""


def test_own_work_is_without_waits_and_its_error_needs_steps() -> None:
    parts = {"data": 0.001, "forward": 0.002, "communication": 0.5, "sync": 0.5, "evaluation": 0.5}
    assert own_seconds(parts) == pytest.approx(0.003)
    assert step_waits([StepRow(seconds=1.0, parts=parts, step=3), StepRow(seconds=1.0)]) == ((3, 0.5),)
    rows = [StepRow(seconds=1.0, parts={"data": 0.001, "communication": wait}) for wait in (0.1, 0.5)]
    assert own_error_seconds(rows) is None
    assert own_typical_seconds([]) is None
    assert own_typical_seconds(rows) == 0.001
    assert own_error_seconds(rows * 2) == 0.0  # waits may differ as they like
