"""How documents of `flatout profile` are scored, on documents made by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.diagnose import __main__ as runner
from benchmarks.diagnose import catalogue, running, scoring
from benchmarks.diagnose.catalogue import Script

BY_NAME = {one.name: one for one in catalogue.scripts()}
LEAK = BY_NAME["memory-leak/faulty"]
FIXED = BY_NAME["memory-leak/healthy"]


def finding(name: str, line: int = 1, severity: str = "warning", **more: Any) -> dict[str, Any]:
    return {"name": name, "severity": severity, "lines": [["faulty.py", line, "text"]], **more}


def judged(script: Script, *findings: dict[str, Any]) -> scoring.Outcome:
    return scoring.judge(script, scoring.read_findings({"findings": list(findings)}))


def test_the_right_finding_at_the_right_line() -> None:
    (line,) = LEAK.marked_lines
    outcome = judged(
        LEAK, finding("memory-leak", line, cost_share=0.125), finding("note-of-something", severity="note")
    )
    assert (outcome.found, outcome.exactly, outcome.line_right, outcome.alarms) == (True, True, True, ())
    assert outcome.predicted_share == 0.125


def test_another_line_and_another_accepted_name() -> None:
    (line,) = LEAK.marked_lines
    assert judged(LEAK, finding("memory-leak", line + 1)).line_right is False
    other = judged(LEAK, finding("graph-kept-by-logging", line))
    assert (other.found, other.exactly, other.line_right) == (True, False, True)


def test_a_line_of_another_file_or_late_in_a_list_does_not_count() -> None:
    (line,) = LEAK.marked_lines
    elsewhere = {**finding("memory-leak"), "lines": [["other.py", line, ""]]}
    late = {**finding("memory-leak"), "lines": [["faulty.py", line + n, ""] for n in (1, 2, 3, 0)]}
    assert judged(LEAK, elsewhere).line_right is False
    assert judged(LEAK, late).line_right is False


def test_what_follows_from_the_fault_is_neither_the_answer_nor_an_alarm() -> None:
    exploding = BY_NAME["exploding-gradients/faulty"]
    outcome = judged(exploding, finding("loss-not-falling"))
    assert (outcome.found, outcome.alarms) == (False, ())


def test_missed_and_accused_of_something_else() -> None:
    outcome = judged(LEAK, finding("anomaly-mode"), finding("epoch-starts", severity="note"))
    assert (outcome.found, outcome.line_right, outcome.alarms) == (False, None, ("anomaly-mode",))


def test_a_healthy_script_is_accused_by_any_warning_and_by_any_subject() -> None:
    assert judged(FIXED).alarms == ()
    assert judged(FIXED, finding("something", severity="note")).alarms == ()
    assert judged(FIXED, finding("something")).alarms == ("something",)
    assert judged(FIXED, finding("memory-leak", severity="note")).alarms == ("memory-leak",)


@pytest.mark.parametrize(
    ("predicted", "gain", "right"),
    [(0.40, 0.50, True), (0.37, 0.50, False), (0.03, 0.01, True), (0.05, 0.01, False), (None, 0.0, False)],
)
def test_a_cost_is_right_within_a_quarter_or_two_percent_of_a_step(
    predicted: float | None, gain: float, right: bool
) -> None:
    assert scoring.cost_right(predicted, gain) is right


def test_gain_is_the_median_over_neighbouring_runs() -> None:
    assert scoring.gain_share([10.0, 20.0, 10.0], [5.0, 10.0, 9.0]) == 0.5


def test_training_seconds_are_those_of_all_steps() -> None:
    assert running.training_seconds([1.0, 2.0, 3.0, 4.0]) == pytest.approx(4.0)
    assert running.training_seconds([1.0, 2.0]) is None


def test_a_script_counts_as_found_only_if_it_was_found_every_time() -> None:
    (line,) = LEAK.marked_lines
    found, missed = judged(LEAK, finding("memory-leak", line, cost_share=0.2)), judged(LEAK)
    quiet, accused = judged(FIXED), judged(FIXED, finding("python-time"))
    once = scoring.score({LEAK.name: [found, missed], FIXED.name: [quiet, accused]}, {})
    assert (once.recall.right, once.recall.of, once.recall.wrong) == (0, 1, (LEAK.name,))
    assert (once.quiet.right, once.quiet.wrong) == (0, (FIXED.name,))
    assert not once.reaches_goals
    always = scoring.score({LEAK.name: [found, found], FIXED.name: [quiet]}, {LEAK.pair: 0.21})
    assert always.reaches_goals
    assert (always.costs.right, always.costs.of, always.lines.right) == (1, 1, 1)
    assert always.extra.share == 1.0


def test_no_answer_is_neither_found_nor_quiet() -> None:
    outcomes = {LEAK.name: [scoring.no_answer(LEAK)], FIXED.name: [scoring.no_answer(FIXED)]}
    made = scoring.score(outcomes, {})
    assert (made.recall.right, made.quiet.right, made.lines.of) == (0, 0, 0)


def command_that_says(folder: Path, text: str) -> str:
    """A stand-in for Flatout, which notes every call."""
    script = folder / "stand_in.py"
    script.write_text(f"open({str(folder / 'calls')!r}, 'a').write('x')\nprint({text!r})\n")
    return f"{sys.executable} -S {script}"


def test_what_the_file_holds_is_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = LEAK.marked_lines
    command = command_that_says(tmp_path, json.dumps({"findings": [finding("memory-leak", line)]}))
    words = ["--only", LEAK.name, "--repeats", "2", "--out", str(tmp_path / "out.json"), "--flatout", command]
    assert runner.main(words) == 0
    assert (tmp_path / "calls").read_text() == "xx"
    assert runner.main(words) == 0
    assert (tmp_path / "calls").read_text() == "xx"
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["scores"]["cpu"]["recall"]["share"] == 1.0
    assert document["versions"]["torch"] != "not installed"
    assert "faults found" in capsys.readouterr().out


def test_a_command_without_a_document_is_an_error_of_that_script(tmp_path: Path) -> None:
    words = ["--only", FIXED.name, "--repeats", "1", "--out", str(tmp_path / "out.json")]
    assert runner.main([*words, "--flatout", command_that_says(tmp_path, "no JSON")]) == 1
    entry = json.loads((tmp_path / "out.json").read_text())["entries"][f"asked {FIXED.name} 0"]
    assert entry["findings"] is None
    assert runner.main([*words, "--flatout", command_that_says(tmp_path, '{"findings": []}')]) == 0, "asked again"


def test_another_file_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "notes.json"
    path.write_text('{"schema": "something else"}')
    with pytest.raises(SystemExit, match="no flatout-diagnose-1 document"):
        runner.Notes(path)


def test_the_peer_names_an_area() -> None:
    starved = BY_NAME["starved-loader/faulty"]
    said = {
        starved.name: (starved, {"verdict": "INPUT-BOUND", "steps_found": 40}),
        LEAK.name: (LEAK, {"verdict": "COMPUTE-BOUND", "steps_found": 0}),
        FIXED.name: (FIXED, {"verdict": None, "steps_found": None}),
    }
    made = scoring.score_peer(said)
    assert (made.saw_steps.right, made.right_area.right, made.right_area.wrong) == (1, 1, (LEAK.name,))
    assert made.quiet.share == 1.0
    assert scoring.peer_area("MEMORY: CREEP_CONFIRMED") == {"memory-leak", "graph-kept-by-logging"}
