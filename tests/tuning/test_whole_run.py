"""A whole run: start-up against what each step saves."""

from __future__ import annotations

from pathlib import Path

import pytest

from flatout.errors import TrialError
from flatout.levers.chunked_loss import ChunkedLoss
from flatout.levers.lever import Choice
from flatout.machine.detect import detect
from flatout.script.entry import Target
from flatout.statistics import compare_paired
from flatout.tuning import script_tuning
from flatout.tuning.outcome import Found
from flatout.tuning.results import SearchState
from flatout.tuning.whole_run import WholeRun, own_start_seconds
from flatout.tuning.windows import Pairing


def final(plain_seconds: float, planned_seconds: float, lever_start_seconds: float | None) -> Pairing:
    pairs = [(plain_seconds, planned_seconds)] * 6
    return Pairing.of(pairs, compare_paired(*zip(*pairs, strict=True)), lever_start_seconds)


def test_start_up_and_steps_are_added_up() -> None:
    last = final(0.01, 0.005, 1.5)
    found = WholeRun.of(last, own_start_seconds=0.5, script_start_seconds=4.0, steps=1000)
    assert found.payoff_steps == 400
    assert found.plain_seconds == pytest.approx(14.0)
    assert found.planned_seconds == pytest.approx(11.0)
    assert found.ratio == pytest.approx(14 / 11)


def test_where_whole_runs_were_compared_levers_start_within_the_steps_and_some_of_those_with_the_script() -> None:
    last = final(2.0, 1.0, None)
    found = WholeRun.of(last, own_start_seconds=0.5, script_start_seconds=4.0, steps=5, steps_at_start=1)
    assert (found.lever_start_seconds, found.payoff_steps) == (None, 1)
    assert found.plain_seconds == pytest.approx(4.0 + 4 * 2.0)
    assert found.planned_seconds == pytest.approx(4.0 + 0.5 + 4 * 1.0)


def test_a_run_of_unknown_length_has_no_ratio() -> None:
    last = final(0.01, 0.02, 0.0)
    found = WholeRun.of(last, own_start_seconds=0.5, script_start_seconds=4.0, steps=None)
    assert (found.ratio, found.payoff_steps) == (None, None)


def test_our_own_start_is_measured_and_watch_does_not_show_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, folder = tmp_path / "runs", tmp_path / "trials"
    for one in (runs, folder):
        one.mkdir()
    monkeypatch.setenv("FLATOUT_RUNS_DIR", str(runs))
    assert 0.0 < own_start_seconds(folder) < 60.0
    assert [*runs.iterdir()] == []


def test_where_it_is_unknown_the_result_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(folder: Path) -> float:
        raise TrialError("run empty.py ended with code 1")

    def found(*_: object) -> Found:
        kept = Choice(ChunkedLoss(), "chunked")
        return Found(state=SearchState(kept=[kept]), proof=None, final=final(2.0, 1.0, 0.0), warnings=("busy",))

    monkeypatch.setattr(script_tuning, "own_start_seconds", fails)
    monkeypatch.setattr(script_tuning, "search_and_prove", found)
    script = tmp_path / "train.py"
    script.write_text("")
    tuned = script_tuning.tune_script(script_tuning.TuneRequest(target=Target(path=str(script))), detect())
    assert tuned.whole is None
    assert tuned.warnings == ("busy", "the gain of a whole run is unknown, because run empty.py ended with code 1")
