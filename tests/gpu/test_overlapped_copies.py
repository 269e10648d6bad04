"""Copies to a GPU that are not waited for: the values are those of the call, whatever happens to the tensor then."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from flatout.levers import overlapped_copies
from flatout.levers.overlapped_copies import OverlappedCopies
from flatout.levers.subject import Subject
from flatout.replaced import replaced

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

LEVER = OverlappedCopies()


@pytest.fixture
def queued() -> Iterator[list[bool]]:
    """Of each call of torch's own `to` and `cuda`: was it one that the host does not wait for?"""
    torch.cuda.init()
    calls: list[bool] = []

    def noting(original: Any) -> Any:
        def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            calls.append(bool(kwargs.get("non_blocking")) and tensor.is_pinned())
            return original(tensor, *args, **kwargs)

        call.__name__ = original.__name__
        return call

    with replaced(torch.Tensor, "to", noting), replaced(torch.Tensor, "cuda", noting):
        yield calls


@pytest.mark.parametrize("how", ["name", "device", "keyword", "cuda", "cuda 0"])
def test_what_is_copied_is_what_was_there(how: str, queued: list[bool]) -> None:
    copies: list[Tensor] = []
    with LEVER.apply(Subject(), True):
        x = torch.zeros(64, 64)
        for step in range(20):
            x.numpy()[:] = step
            match how:
                case "name":
                    copies.append(x.to("cuda"))
                case "device":
                    copies.append(x.to(torch.device("cuda:0")))
                case "keyword":
                    copies.append(x.to(device="cuda"))
                case "cuda":
                    copies.append(x.cuda())
                case _:
                    copies.append(x.cuda(0))
            x.numpy()[:] = -1
    assert queued == [True] * 20
    assert [one.unique().tolist() for one in copies] == [[float(step)] for step in range(20)]


def test_the_layout_is_kept(queued: list[bool]) -> None:
    x = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    plain = x.to("cuda")
    with LEVER.apply(Subject(), True):
        copy = x.to("cuda")
    assert queued == [False, True]
    assert (copy.stride(), copy.dtype, copy.device) == (plain.stride(), plain.dtype, plain.device)
    assert torch.equal(copy, plain)


ASKED: dict[str, Any] = {
    "another dtype too": lambda x: x.to("cuda", torch.float64),
    "a dtype": lambda x: x.to(torch.float64),
    "the host": lambda x: x.to("cpu"),
    "like another": lambda x: x.to(torch.zeros(1, device="cuda")),
    "with a gradient": lambda x: x.requires_grad_().to("cuda"),
    "a part": lambda x: x[:, 1:].to("cuda"),
    "nothing": lambda x: x[:0].to("cuda"),
    "a parameter": lambda x: torch.nn.Parameter(x).to("cuda"),
}


@pytest.mark.parametrize("what", ASKED)
def test_other_calls_stay_as_they_are(what: str, queued: list[bool]) -> None:
    x = torch.randn(3, 4)
    plain = ASKED[what](x.clone())
    with LEVER.apply(Subject(), True):
        other = ASKED[what](x.clone())
    assert queued == [False] * 2
    assert (other.device, other.dtype, other.requires_grad) == (plain.device, plain.dtype, plain.requires_grad)
    assert torch.equal(other, plain)


def test_another_stream_ends_it_as_it_may_not_wait_for_the_copies(queued: list[bool]) -> None:
    subject = Subject()
    with LEVER.apply(subject, True):
        torch.ones(3).to("cuda")
        with torch.cuda.stream(torch.cuda.default_stream()):
            torch.ones(3).to("cuda")
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.ones(3).to("cuda")
        torch.ones(3).to("cuda")
    assert queued == [True, True, False, False]
    assert "something works in a stream of its own" in subject.incidents[0][1]


@pytest.mark.parametrize("how", ["to", "copy_"])
def test_copies_from_the_gpu_that_nobody_waits_for_end_it(how: str, queued: list[bool]) -> None:
    """They are complete after the next plain copy to the GPU, and a script may live by that."""
    subject, there = Subject(), torch.ones(3, device="cuda")
    with LEVER.apply(subject, True):
        torch.ones(3).to("cuda")
        if how == "to":
            there.to("cpu", torch.float32, True)
        else:
            torch.zeros(3).copy_(there, True)
        queued.clear()
        torch.ones(3).to("cuda")
    assert queued == [False]
    assert [name for name, _ in subject.incidents] == ["overlapped copies"]


def test_the_memory_that_waits_is_bounded(queued: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlapped_copies, "MOST_WAITING_BYTES", 100)
    waits: list[None] = []
    synchronize = torch.cuda.Event.synchronize
    monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda event: (waits.append(None), synchronize(event)))
    with LEVER.apply(Subject(), True):
        for _ in range(5):
            torch.ones(10).to("cuda")
        assert len(waits) == 3
        torch.ones(26).to("cuda")
    assert queued == [True] * 5 + [False]


def test_a_script_trains_to_the_same_bits(queued: list[bool]) -> None:
    def trained() -> Tensor:
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 2).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x = torch.randn(40, 8)
        for rows in x.split(4):
            optimizer.zero_grad()
            model(rows.to("cuda")).square().mean().backward()
            optimizer.step()
            rows.zero_()
        return model.weight.detach().cpu()

    plain = trained()
    assert not any(queued)
    with LEVER.apply(Subject(), True):
        overlapped = trained()
    assert sum(queued) == 10
    assert torch.equal(plain, overlapped)
