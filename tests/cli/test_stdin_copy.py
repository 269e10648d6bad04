"""What is piped into a verb that runs its script several times."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from flatout.cli import streams
from flatout.cli.streams import WAITING, stdin_copy


def test_an_input_that_does_not_end_is_told_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read, write = os.pipe()
    monkeypatch.setattr(streams, "PATIENCE_SECONDS", 0.0)
    with os.fdopen(read) as given:
        monkeypatch.setattr("sys.stdin", given)

        def end() -> None:
            os.write(write, b"late")
            os.close(write)

        timer = threading.Timer(0.2, end)
        timer.start()
        with stdin_copy() as copy:
            assert copy is not None
            assert copy.read_text() == "late"
    timer.join()
    assert capsys.readouterr().err == f"{WAITING}\n"


def test_a_file_is_kept_whole_and_nothing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lines").write_text("a\nb\n")
    with open(tmp_path / "lines") as given:
        monkeypatch.setattr("sys.stdin", given)
        with stdin_copy() as copy:
            assert copy is not None
            assert copy.read_text() == "a\nb\n"
    assert capsys.readouterr().err == ""
