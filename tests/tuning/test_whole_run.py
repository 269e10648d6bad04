"""A whole run: start-up against what each step saves."""

from __future__ import annotations

from pathlib import Path

import pytest

from flatout.tuning.whole_run import own_start_seconds, whole_run


def test_start_up_and_steps_are_added_up() -> None:
    found = whole_run(
        own_start_seconds=0.5,
        lever_start_seconds=1.5,
        script_start_seconds=4.0,
        plain_step_seconds=0.01,
        planned_step_seconds=0.005,
        steps=1000,
    )
    assert found.payoff_steps == 400
    assert found.plain_seconds == pytest.approx(14.0)
    assert found.planned_seconds == pytest.approx(11.0)
    assert found.ratio == pytest.approx(14 / 11)


def test_where_whole_runs_were_compared_levers_start_within_the_steps_and_some_of_those_with_the_script() -> None:
    found = whole_run(
        own_start_seconds=0.5,
        lever_start_seconds=None,
        script_start_seconds=4.0,
        plain_step_seconds=2.0,
        planned_step_seconds=1.0,
        steps=5,
        steps_at_start=1,
    )
    assert (found.lever_start_seconds, found.payoff_steps) == (None, 1)
    assert found.plain_seconds == pytest.approx(4.0 + 4 * 2.0)
    assert found.planned_seconds == pytest.approx(4.0 + 0.5 + 4 * 1.0)


def test_a_run_of_unknown_length_has_no_ratio() -> None:
    found = whole_run(
        own_start_seconds=0.5,
        lever_start_seconds=0.0,
        script_start_seconds=4.0,
        plain_step_seconds=0.01,
        planned_step_seconds=0.02,
        steps=None,
    )
    assert (found.ratio, found.payoff_steps) == (None, None)


def test_our_own_start_is_measured_and_watch_does_not_show_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, folder = tmp_path / "runs", tmp_path / "trials"
    for one in (runs, folder):
        one.mkdir()
    monkeypatch.setenv("FLATOUT_RUNS_DIR", str(runs))
    assert 0.0 < own_start_seconds(folder) < 60.0
    assert [*runs.iterdir()] == []
