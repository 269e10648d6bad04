"""The memory of single steps in a run that goes on: right, harmless, and rare."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from flatout.levers.subject import Subject
from flatout.script import runner as runners
from flatout.script.runner import Runner
from flatout.script.step_memory import MemorySample, StepMemory
from flatout.script.watch import Watch


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runner]:
    monkeypatch.setattr(runners, "WINDOW_EVERY_SECONDS", 0.0)
    monkeypatch.setattr(runners, "WINDOW_LONGEST_SECONDS", 0.0)
    monkeypatch.setattr(Watch, "saw_compile", False)  # another test of this process may have compiled
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


def test_an_error_of_the_count_is_no_error_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    from flatout.memory.tracking import Tracker

    def fails(*args: object) -> None:
        raise KeyError("ours")

    monkeypatch.setattr(Tracker, "see_results", fails)
    memory = StepMemory(Subject())
    memory.begin("cpu")
    assert torch.ones(3).sum() == 3
    assert memory.end(1) is None


def test_fragmentation_is_what_is_reserved_for_no_tensor() -> None:
    assert MemorySample(step=1, peak_bytes=9, held_bytes=6, reserved_bytes=8).fragmentation == 0.25
    assert MemorySample(step=1, peak_bytes=9, held_bytes=6).fragmentation is None
