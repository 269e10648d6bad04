"""flatout report: the file it writes, and one clear line where it cannot."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from flatout.__main__ import main

FORMATS = Path(__file__).parents[1] / "recorded" / "formats"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for kind in ("tune", "run", "check"):
        shutil.copy(FORMATS / f"{kind}-1.json", tmp_path / f"{kind}.json")
    return tmp_path


def test_it_writes_one_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "run.json", "tune.json"]) == 0
    assert capsys.readouterr().out.startswith("report.html, ")
    page = (folder / "report.html").read_text()
    assert page.startswith("<!DOCTYPE html>")
    assert main(["report", "run.json", "--out", "other.html", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["page"] == "other.html"
    assert shown["size_bytes"] == (folder / "other.html").stat().st_size


def test_it_opens_the_page_where_that_is_asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    assert main(["report", "run.json", "--open"]) == 0
    assert opened == [(folder / "report.html").as_uri()]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["absent.json"], "cannot read absent.json: No such file or directory; pass a JSON document"),
        (["foreign.json"], "foreign.json is not a document of Flatout's"),
        (["text.json"], "text.json is not a JSON document"),
        (["check.json"], "check.json is a 'check' document"),
        (["newer.json"], "newer.json was written by Flatout 9.0, schema 2"),
        (["run.json", "run.json"], "run.json is another 'run'"),
        (["broken.json"], "broken.json.findings is 'x'; a list is needed there"),
        (["run.json", "--out", "no/report.html"], "cannot write no/report.html: No such file or directory"),
        (["run.json", "tune.json", "--out", "tune.json"], "the page would replace a file that is only read"),
        ([], "Missing argument 'FILE.json'"),
    ],
)
def test_what_cannot_be_shown_is_one_line_and_2(
    words: list[str], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "foreign.json").write_text("{}")
    (folder / "text.json").write_text("<html>")
    (folder / "newer.json").write_text('{"flatout": {"document": "run", "schema": 2, "version": "9.0"}}')
    run = json.loads((folder / "run.json").read_text())
    (folder / "broken.json").write_text(json.dumps({**run, "findings": "x"}))
    assert main(["report", *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not (folder / "report.html").exists()
    assert (folder / "tune.json").read_bytes() == (FORMATS / "tune-1.json").read_bytes()
