"""A run's memory of itself stays bounded, and stays fair to all of the run."""

from __future__ import annotations

import pytest

from flatout.script.runner import MOST_ROWS, MOST_SAMPLES, RunRecord
from flatout.script.spans import StepRow


def test_a_million_steps_cost_what_a_few_thousand_do() -> None:
    record = RunRecord()
    for step in range(1_000_000):
        record.add_steps(float(step), 1)
    for _ in range(100):
        record.add_rows([StepRow(seconds=1.0)] * 30)
    for step in range(20_000):
        record.steps = step
        record.add_resident(step, float(step))
    assert record.timed == 1_000_000
    assert len(record.samples) < MOST_SAMPLES
    assert len(record.rows) == MOST_ROWS
    assert len(record.resident) < MOST_SAMPLES
    assert record.median_seconds == pytest.approx(500_000, rel=0.01)  # thinned evenly
    gaps = {b - a for a, b in zip(record.samples, record.samples[1:], strict=False)}
    assert gaps == {float(record.stride)}
    assert record.recent_seconds == pytest.approx(1_000_000, rel=0.01)


def test_a_pause_between_steps_is_no_step() -> None:
    record = RunRecord()
    for step in range(100):
        record.add_steps(0.01, 1)
        if step % 25 == 24:
            record.add_steps(5.0, 1)
    record.add_steps(0.16, 16)
    assert (record.pauses, record.pause_seconds) == (4, pytest.approx(4 * 4.99, rel=0.01))
    assert record.recent_seconds == pytest.approx(0.01, rel=0.2)


def test_nothing_seen_is_none() -> None:
    record = RunRecord()
    assert record.median_seconds is None
    assert record.recent_seconds is None


def test_only_the_first_shortage_of_memory_is_an_alarm() -> None:
    record = RunRecord(steps=7)
    assert not record.note_memory_left(10, 100)
    assert record.note_memory_left(2, 100)
    assert not record.note_memory_left(1, 100)
    assert record.nearly_out == (7, 2, 100)
