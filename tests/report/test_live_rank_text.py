"""The ranks of a run that goes on, in words: one that is gone, silent or waited for is marked."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from flatout.diagnose.seen_run import LiveRanks, live_ranks
from flatout.machine.processes import pid_namespace, process_started
from flatout.report.live_text import (
    LiveView,
    live_rows,
    panel_lines,
    rank_lines,
    rank_rows,
    ranks_parts,
)
from flatout.script.process_record import ProcessRecord, own_seconds
from tests.live_states import FINDING, run_state

NOW = 1100.0
PARTS = {"data": 0.001, "forward": 0.004, "backward": 0.005, "communication": 0.002}


def record(rank: int, **changes: Any) -> ProcessRecord:
    """Of this process, so that it is there."""
    usual: dict[str, Any] = {
        "pid": os.getpid(),
        "process_started": process_started(os.getpid()),
        "pid_namespace": pid_namespace(),
        "rank": rank,
        "ranks": 2,
        "started_at": float(rank),
        "steps": 1234,
        "step_seconds": 0.012,
        "recent_seconds": 0.012,
        "last_step_clock": NOW,
        "parts": PARTS,
        "exposed_seconds": PARTS["communication"],
        "own_error_seconds": 1e-4,
        "busy_share": 0.5,
        "own_typical_seconds": own_seconds(changes.get("parts", PARTS)),
        "device": "cpu",
        "peak_resident_bytes": 1 << 30,
    }
    return ProcessRecord(**usual | changes)


LATE = {"parts": PARTS | {"data": 0.011, "communication": 0.0005}, "exposed_seconds": 0.0005}
WAITING = {"parts": PARTS | {"communication": 0.0115}, "exposed_seconds": 0.0115}


def shown(*records: ProcessRecord) -> LiveRanks:
    return live_ranks(records, NOW)


def test_a_line_for_each_rank() -> None:
    found = shown(record(0), record(1, steps=1230))
    assert rank_lines(found, 9) == [
        "rank 0  step 1,234 · 12 ms · data 8%, forward 33%, backward 42%, waits 17% · 1 GiB",
        "rank 1  step 1,230 · 12 ms · data 8%, forward 33%, backward 42%, waits 17% · 1 GiB",
    ]
    assert ranks_parts(found) == ["2 ranks", "steps 1,230 to 1,234", "12 ms a step", "communication exposed 17%"]
    assert rank_rows(found)[0] == ("ranks", " · ".join(ranks_parts(found)))
    assert [label for label, _ in rank_rows(found)] == ["ranks", "rank 0", "rank 1"]


def test_the_rank_that_the_others_wait_for_is_marked() -> None:
    lines = rank_lines(shown(record(0, **WAITING), record(1, **LATE)), 9)
    assert lines[1].startswith("rank 1  the others wait 10 ms of each step for it · step 1,234")
    assert "wait 10" not in lines[0]


def test_a_rank_that_is_gone_or_silent_is_marked() -> None:
    gone = record(0, process_started="another")
    silent = record(1, last_step_clock=NOW - 60)
    ended = record(2, ended=True, last_step_clock=NOW - 60)
    elsewhere = record(3, pid_namespace="another")
    found = shown(gone, silent, ended, elsewhere)
    assert [one.condition for one in found.ranks] == ["killed", "running", "ended", "unknown"]
    lines = rank_lines(found, 9)
    assert "GONE: its process died unexpectedly" in lines[0]
    assert "SILENT: last step 1 min ago" in lines[1]
    assert "ended · step" in lines[2]
    assert lines[3].startswith("rank 3  step")
    assert {"1 gone", "1 silent"} <= set(ranks_parts(found))
    slow = record(0, recent_seconds=20.0, step_seconds=20.0, last_step_clock=NOW - 60)
    assert shown(slow).ranks[0].silent_seconds is None  # its steps take so long


def test_where_there_is_no_room_those_in_trouble_stay() -> None:
    records = [record(number) for number in range(64)]
    records[40] = replace(records[40], process_started="another")
    found = shown(*records)
    lines = rank_lines(found, 3)
    assert lines[0].startswith("rank 0")
    assert lines[1].startswith("rank 40  GONE")
    assert lines[2] == "and 62 more"
    rows = rank_rows(found)
    assert len(rows) == 18
    assert "rank 40" in [label for label, _ in rows]
    assert rank_lines(found, 0) == []


def test_of_processes_that_had_the_same_rank_the_last_counts() -> None:
    first, again = record(0, steps=9, ended=True), record(0, started_at=50.0)
    assert [one.record.steps for one in shown(again, first).ranks] == [1234]
    assert not live_ranks([], NOW)


def test_the_panel_and_the_rows_of_a_run_whose_training_is_in_other_processes() -> None:
    found = shown(record(0, **WAITING), record(1, **LATE))
    view = LiveView(state=run_state(steps=0, step_seconds=None, findings=(FINDING,)), clock_seconds=NOW, ranks=found)
    lines = panel_lines(view, 120, 6)
    assert lines[0].startswith(" flatout · 2 ranks · step 1,234 · 12 ms a step")
    assert [line[:8] for line in lines[1:3]] == [" rank 0 ", " rank 1 "]
    assert lines[3].startswith(" ! the model waits")
    assert all(len(line) <= 40 for line in panel_lines(view, 40, 6))
    assert len(panel_lines(view, 120, 3)) == 3
    assert panel_lines(view, 120, 1)[0].startswith(" flatout · 2 ranks")
    labels = [label for label, _ in live_rows(view)]
    assert labels[:4] == ["script", "ranks", "rank 0", "rank 1"]
    assert ("step", "waiting for the first step") not in live_rows(view)
