"""flatout compare, and its gate for CI: what it prints, what it writes, and every exit code."""

from __future__ import annotations

import json
import random
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from flatout.__main__ import main
from flatout.report.document import document, write_document
from flatout.timing import measurement

MACHINE = json.loads((Path(__file__).parents[1] / "recorded" / "machine_two_cores.json").read_text())
OTHER = {**MACHINE, "fingerprint": "other"}


class Runs:
    """Writes what `flatout run` would have."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.rng = folder, random.Random(0)

    def side(self, name: str, seconds: float, runs: int = 4, *, spread: float = 0.002, **changed: Any) -> str:
        (self.folder / name).mkdir()
        for number in range(runs):
            speed = seconds * self.rng.lognormvariate(0, spread)
            samples = [speed * self.rng.lognormvariate(0, 0.01) for _ in range(20)]
            payload = {"machine": MACHINE, "script": {"name": "train.py"}, **changed}
            doc = document("run", {**payload, "measurement": measurement("step", samples).to_json()})
            write_document(self.folder / name / f"{number}.json", doc)
        return str(self.folder / name)


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def gate(*words: str) -> int:
    return main(["compare", "--fail-if", "slower", *words])


def test_two_files_are_compared(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    slow, fast = (f"{runs.side(name, seconds, 1)}/0.json" for name, seconds in (("slow", 2.0), ("fast", 1.0)))
    assert main(["compare", slow, fast]) == 0
    assert capsys.readouterr().out.startswith("verdict    faster\nratio      x")
    assert main(["compare", "--json", slow, fast]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["comparison"]["verdict"], shown["unit"], shown["gate"]) == ("faster", "steps", None)
    assert main(["compare", fast, slow]) == 0
    assert gate(fast, slow) == 3
    assert "assumes    the machine was equally fast during both runs" in capsys.readouterr().out


def test_the_exit_codes_of_the_gate(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    base, same, slower = runs.side("base", 1.0), runs.side("same", 1.0), runs.side("slower", 1.2)
    assert gate(base, same) == 0
    assert capsys.readouterr().out.startswith("gate       not slower: at most ")
    assert gate(slower, base) == 0
    capsys.readouterr()
    assert gate(base, slower) == 3
    assert capsys.readouterr().out.splitlines()[0].endswith("slower, beyond the threshold of 3%")
    assert gate(base, slower, "--threshold", "30%") == 0
    wild = runs.side("wild", 1.0, spread=0.1)
    assert gate(base, wild) == 4
    assert "undecided: between " in capsys.readouterr().out
    assert gate(base, wild, "--on-undecided", "pass") == 0
    assert gate(base, slower, "--on-undecided", "pass") == 3
    assert gate(base, f"{same}/0.json") == 4  # one run of a side


def test_runs_of_different_scripts_do_not_pass(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    base, other = runs.side("base", 1.0), runs.side("other", 0.5, script={"name": "eval.py"})
    assert gate(base, other) == 4
    assert "different scripts, train.py and eval.py" in capsys.readouterr().out.splitlines()[0]
    assert main(["compare", base, other]) == 0
    assert "the script differs: train.py and eval.py" in capsys.readouterr().out


def test_different_machines_have_an_exit_code_of_their_own(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    base, elsewhere = runs.side("base", 1.0), runs.side("elsewhere", 1.0, machine=OTHER)
    assert gate(base, elsewhere) == main(["compare", base, elsewhere]) == 5
    report = runs.folder / "gate.xml"
    assert gate(base, elsewhere, "--junit", str(report), "--github", "--on-undecided", "pass") == 5
    shown = capsys.readouterr()
    assert shown.out.startswith(
        "::error title=train.py%3A not comparable::the first (run 1) and second (run 1) are from"
    )
    assert ElementTree.parse(report).getroot().attrib["errors"] == "1"
    assert "Traceback" not in shown.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["absent.json", "base"], "cannot read absent.json: No such file"),
        (["base", "empty"], "no .json file in empty"),
        (["absent-*.json", "base"], "no file matches absent-*.json"),
        (["base", "base", "--threshold", "3%"], "pass --fail-if slower too"),
        (["base", "base", "--fail-if", "slower", "--threshold", "0.03"], "'0.03' is not a percentage; write it as 3%"),
        (["base", "base", "--fail-if", "slower", "--threshold", ""], "'' is not a percentage; write it as 3%"),
        (
            ["base", "base", "--fail-if", "slower", "--junit", "base/0.json"],
            "--junit is base/0.json; the JUnit report would replace a file that is only read",
        ),
        (["base", "base", "--fail-if", "slower", "--json", "--github"], "--json prints one document"),
        (["base", "base", "--fail-if", "slower", "--junit", "no/gate.xml"], "cannot write no/gate.xml: No such file"),
        (["base", "base", "--fail-if", "faster"], "--fail-if"),
        (["", "base"], "one side is ''; it is a file, a folder of files"),
        (["a" * 3000, "base"], "File name too long"),
        (["base", "note.json"], "note.json is not a document of Flatout's"),
    ],
)
def test_bad_usage_is_one_line_and_2(
    words: list[str], said: str, runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.side("base", 1.0)
    (runs.folder / "empty").mkdir()
    (runs.folder / "note.json").write_text("{}")
    monkeypatch.chdir(runs.folder)
    assert main(["compare", *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_pattern_names_the_runs_of_a_side(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    base, slower = runs.side("base", 1.0), runs.side("slower", 1.2)
    assert gate(f"{base}/[0-2].json", f"{slower}/*.json", "--json") == 3
    shown = json.loads(capsys.readouterr().out)
    assert (len(shown["baseline"]), len(shown["candidate"]), shown["unit"]) == (3, 4, "runs")
    assert shown["gate"]["verdict"] == "slower"
    assert shown["gate"]["low"] > shown["gate"]["threshold"] == 0.03


def test_github_and_junit_say_the_same(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    base, slower, wild = runs.side("base", 1.0), runs.side("slower", 1.2), runs.side("wild", 1.0, spread=0.1)
    report = runs.folder / "gate.xml"
    published = ["--junit", str(report), "--github"]

    def told(*words: str) -> tuple[str, str]:
        gate(*words, *published)
        line = capsys.readouterr().out.splitlines()[-1]
        case = ElementTree.parse(report).getroot().find("testsuite/testcase")
        assert case is not None
        assert case.attrib["name"] == "train.py: not slower by more than 3%"
        return line.partition(" ")[0], case[0].tag

    assert told(base, slower) == ("::error", "failure")
    assert told(slower, base) == ("::notice", "system-out")
    assert told(base, wild) == ("::error", "failure")
    assert told(base, wild, "--on-undecided", "pass") == ("::warning", "skipped")
