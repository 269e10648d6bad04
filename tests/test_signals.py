"""Signals that are put aside for a while, and what their handlers raise."""

from __future__ import annotations

import functools
import signal
from typing import Any

import pytest

from flatout.signals import ctrl_c_is_ours, own_errors_suppressed


def test_ctrl_c_works_again_where_its_handler_was_not_pythons(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers: list[object] = []
    monkeypatch.setattr(signal, "signal", lambda number, handler: handlers.append(handler))
    with ctrl_c_is_ours():
        assert handlers == [signal.SIG_IGN]
    assert handlers == [signal.SIG_IGN, signal.SIG_DFL]


class Alarm(Exception):
    """Of a program's own."""


class Handlers:
    """In the forms in which programs have them."""

    def method(self, number: int, frame: object) -> None:
        raise Alarm

    def __call__(self, number: int, frame: object) -> None:
        raise Alarm


@pytest.mark.parametrize("handler", [Handlers(), Handlers().method, functools.partial(Handlers.method, None)])
def test_what_a_handler_raises_passes_through_and_an_error_of_ours_does_not(handler: Any) -> None:
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(Alarm), own_errors_suppressed():
            signal.raise_signal(signal.SIGUSR1)
        with own_errors_suppressed():
            raise Alarm
    finally:
        signal.signal(signal.SIGUSR1, before)
