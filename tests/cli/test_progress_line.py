"""Progress where stderr is no terminal."""

from __future__ import annotations

import itertools
import sys
from types import SimpleNamespace

import pytest

from flatout.cli import streams
from flatout.terminal import Notice


def test_a_log_gets_a_line_a_minute(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clock = itertools.count(0.0, 25.0)
    monkeypatch.setattr(streams, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with streams.progress_line() as progress:
        for number in range(1, 8):
            progress(f"trying lever {number}")
    said = capsys.readouterr().err.splitlines()
    assert said == ["flatout, after 1 min 15 s: trying lever 3", "flatout, after 2 min 30 s: trying lever 6"]


@pytest.mark.parametrize("stream", [None, "closed"])
def test_a_stream_that_nobody_reads_stops_nothing(monkeypatch: pytest.MonkeyPatch, stream: str | None) -> None:
    monkeypatch.setattr(streams, "LOG_SECONDS", 0.0)
    if stream is None:
        monkeypatch.setattr(sys, "stderr", None)
    else:
        closed = open("/dev/null", "w")  # noqa: SIM115
        closed.close()
        monkeypatch.setattr(sys, "stderr", closed)
    with streams.progress_line() as progress:
        progress("trying a lever")


def test_a_notice_stays(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clock = itertools.count(0.0, 7.0)
    monkeypatch.setattr(streams, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with streams.progress_line() as progress:
        progress("trying a lever")
        progress(Notice("this takes longer"))
    assert capsys.readouterr().err == "flatout, after 14 s: this takes longer\n"
    monkeypatch.setattr(streams, "is_terminal", lambda stream: True)
    with streams.progress_line() as progress:
        progress(Notice("this takes longer"))
        progress("trying a lever")
    assert capsys.readouterr().err == "\r\x1b[Kthis takes longer\n\r\x1b[Ktrying a lever\r\x1b[K"
