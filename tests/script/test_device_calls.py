"""Which calls count as waiting, which as moving. Without a device: nothing crosses, so a move counts as neither."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from flatout.script.device_calls import ASKING, MOVING, DeviceCalls
from flatout.script.spans import Span


class Log:
    """Spans as they were opened and closed."""

    def __init__(self) -> None:
        self.open, self.opened, self.closed = True, 0, list[str]()

    def enter(self, kind: str) -> Span | None:
        if not self.open:
            return None
        self.opened += 1
        return Span(kind, 0.0)

    def leave(self, span: Span) -> None:
        self.closed.append(span.kind)


@pytest.fixture
def log() -> Iterator[Log]:
    log = Log()
    calls = DeviceCalls(log.enter, log.leave)
    calls.install(torch)
    yield log
    calls.uninstall()


def test_asking_for_a_value_is_sync(log: Log) -> None:
    tensor = torch.ones(1)
    assert (tensor.item(), tensor.tolist(), float(tensor), int(tensor), bool(tensor)) == (1.0, [1.0], 1.0, 1, True)
    tensor.cpu(), tensor.numpy(), tensor.nonzero()
    assert set(log.closed) == {"sync"}
    assert log.opened == len(log.closed) >= 8


def test_a_move_that_crosses_nothing_is_neither(log: Log) -> None:
    assert torch.ones(1).to(torch.float64).dtype == torch.float64
    assert log.closed == ["other"]


def test_a_move_to_a_device_is_a_transfer(log: Log) -> None:
    assert torch.ones(1).to("meta").device.type == "meta"
    assert log.closed == ["transfer"]


def test_a_call_that_raises_closes_its_span(log: Log) -> None:
    with pytest.raises(RuntimeError):
        torch.ones(2).item()
    with pytest.raises(RuntimeError):
        torch.ones(2).to("no such device")
    assert log.closed == ["sync", "other"]


def test_outside_of_windows_nothing_is_opened(log: Log) -> None:
    log.open = False
    assert torch.ones(1).to(torch.int64).item() == 1
    assert log.closed == []


def test_uninstalled() -> None:
    before = {name: getattr(torch.Tensor, name) for name in (*ASKING, *MOVING)}
    calls = DeviceCalls(lambda kind: Span(kind, 0.0), lambda span: None)
    calls.install(torch)
    calls.uninstall()
    assert {name: getattr(torch.Tensor, name) for name in before} == before
