"""Ctrl-C in the middle of a tune: what was kept is proved and becomes the plan; again, and all of it ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

import flatout
from flatout.application.tune import TuneResult
from flatout.search.search import STOPPING, stopped_by_interrupt
from tests.tuning import planted_levers as planted
from tests.tuning.test_step_tuning import Slower, data, pretended_sleep, slow_loss

__all__ = ["pretended_sleep"]  # a fixture of the tests below


@pytest.mark.parametrize("kept", [True, False])
def test_the_first_stops_the_search_and_the_second_ends_all(kept: bool) -> None:
    told: list[str] = []
    with stopped_by_interrupt(lambda: kept, told.append):
        if kept:
            signal.raise_signal(signal.SIGINT)
            assert told == [STOPPING]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_the_programs_own_stays_and_so_do_other_threads() -> None:
    asked: list[str] = []

    def inside() -> None:
        with stopped_by_interrupt(lambda: True, asked.append):
            asked.append("went on")

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    before = signal.signal(signal.SIGINT, lambda number, frame: asked.append("the program's"))
    try:
        with stopped_by_interrupt(lambda: True, asked.append):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert asked == ["went on", "the program's"]


def interrupted(monkeypatch: pytest.MonkeyPatch, *moments: str) -> tuple[Callable[[], TuneResult], list[str]]:
    """A tune in which Ctrl-C is pressed each time that progress says what begins with the next of these."""
    levers = (planted.Helps(), Slower())
    monkeypatch.setattr("flatout.tuning.step_tuning.LEVERS", levers)
    monkeypatch.setattr("flatout.train.step.levers_of", lambda scope: levers)
    model = nn.Linear(8, 4)
    step = flatout.TrainStep(model, torch.optim.SGD(model.parameters(), 0.01), slow_loss)
    told, left = [], list(moments)

    def progress(text: str) -> None:
        told.append(text)
        if left and text.startswith(left[0]):
            left.pop(0)
            signal.raise_signal(signal.SIGINT)

    return lambda: flatout.tune(step, data(), seconds=300, progress=progress), told


@pytest.mark.usefixtures("brief", "pretended_sleep")
def test_what_was_kept_before_is_proved_and_becomes_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    tune, told = interrupted(monkeypatch, "trying slower")
    found = tune()
    assert found.plan.choices() == {"cudnn_benchmark": True}
    assert found.proof is not None
    assert found.speedup is not None
    assert [(one.label, one.reason) for one in found.state.not_tried] == [
        ("slower 1", "interrupted when the search was stopped")
    ]
    assert "1 not reached: the search was stopped after" in found.summary()
    assert told.index(STOPPING) < told.index("proof: helps is bit-identical?")
    assert any(text.startswith("trying slower 1 · a step took ") and text.endswith(" left") for text in told)


@pytest.mark.usefixtures("brief", "pretended_sleep")
@pytest.mark.parametrize("moments", [("trying helps",), ("trying slower", "proof:")])
def test_where_nothing_was_kept_or_at_the_second_time_it_ends(
    monkeypatch: pytest.MonkeyPatch, moments: tuple[str, ...]
) -> None:
    tune, _ = interrupted(monkeypatch, *moments)
    with pytest.raises(KeyboardInterrupt):
        tune()
