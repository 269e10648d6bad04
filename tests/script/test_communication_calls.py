"""Which calls count as waiting for other ranks. With a group of one rank: nobody is waited for, but calls are seen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn

from flatout.levers.subject import Subject
from flatout.script import communication_calls
from flatout.script.communication_calls import (
    ALONE,
    COMPILED,
    IN_QUEUES,
    CommunicationCalls,
    not_seen_because,
    ranks_together,
)
from flatout.script.spans import Span
from flatout.script.watch import Watch
from flatout.torch_private.collectives import exchanging_calls


class Log:
    """Spans as they were opened and closed."""

    def __init__(self) -> None:
        self.open, self.in_pass, self.closed = list[str](), 0, list[str]()

    def enter(self, kind: str) -> Span | None:
        self.open.append(kind)
        return Span(kind, 0.0)

    def enter_in_pass(self, kind: str) -> Span | None:
        self.in_pass += 1
        return self.enter(kind)

    def leave(self, span: Span) -> None:
        self.closed.append(span.kind)


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a test before."""
    monkeypatch.setattr(communication_calls, "compile_was_asked_for", lambda: False)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.fixture
def calls() -> Iterator[tuple[CommunicationCalls, Log]]:
    log = Log()
    found = CommunicationCalls(log.enter, log.leave, log.enter_in_pass)
    found.install()
    yield found, log
    found.uninstall()


@pytest.mark.usefixtures("group")
def test_collectives_of_the_script_are_seen(calls: tuple[CommunicationCalls, Log]) -> None:
    _, log = calls
    tensor = torch.ones(3)
    for call in (distributed.all_reduce, lambda t: distributed.broadcast(t, 0), lambda t: distributed.barrier()):
        before = len(log.closed)
        call(tensor)
        assert len(log.closed) > before
    assert tensor.tolist() == [1, 1, 1]
    assert (set(log.closed), len(log.open)) == ({"communication"}, len(log.closed))


@pytest.mark.usefixtures("group")
def test_the_end_of_a_backward_pass_with_ddp_is_seen(calls: tuple[CommunicationCalls, Log]) -> None:
    found, log = calls
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    loss = model(torch.ones(1, 2)).sum()
    ended = found.backward_begins((loss,))
    loss.backward()
    assert log.in_pass == 1
    left = len(log.closed)
    ended()
    assert len(log.closed) == left + 1
    assert not loss._backward_hooks  # ours is gone


def test_a_loss_without_a_graph_is_left_to_torch(calls: tuple[CommunicationCalls, Log]) -> None:
    found, log = calls
    found.backward_begins((torch.ones(1),))()
    assert (log.in_pass, log.closed) == (0, [])


def test_the_pass_computes_the_same(calls: tuple[CommunicationCalls, Log]) -> None:
    found, _ = calls
    gradients = []
    for seen in (True, False):
        torch.manual_seed(0)
        weight = torch.randn(4, 4, requires_grad=True)
        loss = (weight @ weight).tanh().sum()
        ended = found.backward_begins((loss,)) if seen else (lambda: None)
        loss.backward()
        ended()
        assert weight.grad is not None
        gradients.append(weight.grad.clone())
    assert torch.equal(*gradients)


def test_uninstalled() -> None:
    places = exchanging_calls()
    before = [vars(owner).get(name) for owner, name in places]
    log = Log()
    found = CommunicationCalls(log.enter, log.leave, log.enter_in_pass)
    for _ in range(2):
        found.install()
        found.uninstall()
    assert [vars(owner).get(name) for owner, name in places] == before


def test_a_script_that_replaces_what_is_timed_is_left_alone(
    calls: tuple[CommunicationCalls, Log], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, _ = calls
    found.uninstall()
    own = distributed.Work.wait
    monkeypatch.setattr(distributed.Work, "wait", lambda self, *args: own(self, *args))
    mine = distributed.Work.wait
    assert not found.install()
    assert (distributed.Work.wait, found.on) == (mine, False)


@pytest.mark.usefixtures("group")
def test_a_process_alone_waits_for_nobody() -> None:
    assert ranks_together() is None
    assert not_seen_because(Subject(), "cpu") == ALONE


def test_why_waits_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communication_calls, "ranks_together", lambda: (0, 2))
    subject = Subject()
    assert not_seen_because(subject, "cpu") == ""
    assert not_seen_because(subject, "cuda:0") == ""
    monkeypatch.setattr(communication_calls, "_is_sharded", lambda subject: True)
    assert not_seen_because(subject, "cpu") == ""
    assert not_seen_because(subject, "cuda:0") == IN_QUEUES
    monkeypatch.setattr(communication_calls, "compile_was_asked_for", lambda: True)
    assert not_seen_because(subject, "cpu") == COMPILED


@pytest.mark.usefixtures("group")
def test_windows_of_a_rank_have_the_part_and_those_of_a_process_alone_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for ranks in (None, (0, 2)):
        monkeypatch.setattr(communication_calls, "ranks_together", lambda found=ranks: found)
        watch = Watch()
        watch.install(torch)
        try:
            model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            _steps(model, optimizer, 2)
            watch.open_window()
            _steps(model, optimizer, 3)
            rows = watch.close_window()
        finally:
            watch.uninstall()
        assert len(rows) == 3
        assert all((row.parts.get("communication", 0.0) > 0) == (ranks is not None) for row in rows)
        assert watch.communication_unknown_because == (ALONE if ranks is None else "")


def _steps(model: nn.Module, optimizer: Any, count: int) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
