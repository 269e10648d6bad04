from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from flatout.cli.main import main
from flatout.errors import UsageError
from flatout.script import leftovers


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / "tunes.json").write_text("{}")
    monkeypatch.setenv("FLATOUT_CACHE_DIR", str(folder))
    monkeypatch.setenv("FLATOUT_RUNS_DIR", str(tmp_path / "runs"))
    monkeypatch.setattr(leftovers, "leftover_folders", lambda parent: [])
    return folder


def test_a_dry_run_lists_and_removes_nothing(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["clean", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert str(cache / "tunes.json") in shown
    assert "2 B" in shown
    assert (cache / "tunes.json").exists()


def test_without_a_terminal_it_needs_yes(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="--yes"):
        main(["clean"])
    assert (cache / "tunes.json").exists()
    assert main(["clean", "--yes", "--json"]) == 0
    doc = json.loads(capsys.readouterr().out)
    assert [one["what"] for one in doc["removed"]] == ["what earlier tunes measured"]
    assert not cache.exists()
    assert main(["clean"]) == 0
    assert "nothing to remove" in capsys.readouterr().out


@pytest.mark.parametrize(("answer", "stays"), [("n\n", True), ("y\n", False)])
def test_on_a_terminal_it_asks(cache: Path, monkeypatch: pytest.MonkeyPatch, answer: str, stays: bool) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("typer.confirm", lambda text: answer == "y\n")
    assert main(["clean"]) == 0
    assert cache.exists() is stays


def test_a_question_that_is_not_answered_removes_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())  # Ctrl-D; Ctrl-C ends the question in the same way
    monkeypatch.setattr("flatout.cli.clean.is_terminal", lambda stream: True)
    with pytest.raises(KeyboardInterrupt):
        main(["clean"])
    assert cache.exists()
