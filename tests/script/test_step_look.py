"""A closer look at single steps of a run that goes on: right, harmless, and rare."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.flop_counter import FlopCounterMode

from flatout.flops import OperationCount
from flatout.levers.subject import Subject
from flatout.script import runner as runners
from flatout.script import step_look, watch
from flatout.script.runner import Runner
from flatout.script.step_listener import StepListener
from flatout.script.step_look import COMPILED, NO_MODULE, OTHER_MODE, StepLook
from flatout.script.step_memory import MemorySample


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runner]:
    monkeypatch.setattr(runners, "WINDOW_EVERY_SECONDS", 0.0)
    monkeypatch.setattr(runners, "WINDOW_LONGEST_SECONDS", 0.0)
    for module in (step_look, watch):
        monkeypatch.setattr(module, "compile_was_asked_for", lambda: False)  # another test may have compiled
    runner = Runner()
    runner._torch_imported(torch)
    yield runner
    assert runner.fault is None
    runner.watch.uninstall()


def train(steps: int) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters())
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(32, 64)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_run_keeps_samples_and_its_numbers(runner: Runner) -> None:
    losses = train(60)
    runner.ended()
    assert runner.record.steps == 60
    assert len(runner.record.memory) >= 2
    weights = (64 * 64 + 64 + 64 + 1) * 4
    for sample in runner.record.memory:
        assert 4 * weights <= sample.held_bytes < sample.peak_bytes < 10 * weights
    runner.watch.uninstall()
    assert train(60) == losses


def mode() -> object:
    return _get_current_dispatch_mode()


def test_nothing_listens_between_the_calls_of_a_step(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    listened: list[bool] = []
    model = nn.Linear(4, 4)
    model.register_forward_hook(lambda *_: listened.append(mode() is not None))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(30):
        assert mode() is None
        loss = model(torch.ones(2, 4)).sum()
        assert mode() is None
        optimizer.zero_grad()
        loss.backward()
        assert mode() is None
        optimizer.step()
        with torch.no_grad():
            before = len(listened)
            model(torch.ones(2, 4))
            assert listened[before:] == [False]
    with pytest.raises(ZeroDivisionError):
        model(1 / 0)
    assert mode() is None
    assert any(listened)
    assert runner.record.flops_per_step == 2 * (2 * 2 * 4 * 4)  # forward, and the gradient of the weights


def test_an_error_of_the_count_is_no_error_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> None:
        raise KeyError("ours")

    monkeypatch.setattr(StepListener, "hold", lambda self, tensors: None)
    monkeypatch.setattr(OperationCount, "add", fails)
    monkeypatch.setattr(step_look, "compile_was_asked_for", lambda: False)
    look = StepLook(Subject())
    look.begin("cpu", compiled=False)
    x = torch.ones(3, requires_grad=True)
    assert look.forward(lambda: (x * 2).sum(), x).item() == 6
    seen = look.end(1)
    assert (seen.memory, seen.flops, seen.reason) == (None, None, "KeyError: 'ours'")


@pytest.mark.parametrize("reason", [COMPILED, OTHER_MODE, NO_MODULE])
def test_where_nobody_may_listen_the_reason_is_told(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    look = StepLook(Subject())
    monkeypatch.setattr(step_look, "compile_was_asked_for", lambda: reason == COMPILED)
    look.begin("cpu", compiled=False)
    if reason != NO_MODULE:
        with FlopCounterMode(display=False) if reason == OTHER_MODE else contextlib.nullcontext():
            assert look.forward(lambda: 7, None) == 7
    seen = look.end(1)
    assert (seen.memory, seen.flops, seen.reason) == (None, None, reason)


def test_fragmentation_is_what_is_reserved_for_no_tensor() -> None:
    assert MemorySample(step=1, peak_bytes=9, held_bytes=6, reserved_bytes=8).fragmentation == 0.25
    assert MemorySample(step=1, peak_bytes=9, held_bytes=6).fragmentation is None
