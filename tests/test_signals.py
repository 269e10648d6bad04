"""Signals that are put aside for a while."""

from __future__ import annotations

import signal

import pytest

from flatout.signals import ctrl_c_is_ours


def test_ctrl_c_works_again_where_its_handler_was_not_pythons(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers: list[object] = []
    monkeypatch.setattr(signal, "signal", lambda number, handler: handlers.append(handler))
    with ctrl_c_is_ours():
        assert handlers == [signal.SIG_IGN]
    assert handlers == [signal.SIG_IGN, signal.SIG_DFL]
