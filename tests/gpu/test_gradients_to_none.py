"""Gradients that are freed on a GPU: the same bits, in other streams too, and never while a graph is captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatout.levers.gradients_to_none import GradientsToNone
from flatout.levers.subject import Subject

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def made() -> tuple[nn.Linear, nn.Linear, Any]:
    torch.manual_seed(0)
    first, second = nn.Linear(5, 4).cuda(), nn.Linear(4, 3).cuda()
    weights = [*first.parameters(), *second.parameters()]
    return first, second, torch.optim.SGD(weights, 0.1, momentum=0.9, weight_decay=0.1)


def trained() -> list[Tensor]:
    """The second layer gets a gradient in every other step; another stream reads the gradients before each pass."""
    first, second, optimizer = made()
    other = torch.cuda.Stream()
    read = []
    for step in range(5):
        optimizer.zero_grad(set_to_none=False)
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            read += [one.grad.clone() for one in second.parameters() if one.grad is not None]
        torch.cuda.current_stream().wait_stream(other)
        hidden = first(torch.full((6, 5), step + 1.0, device="cuda")).relu()
        (second(hidden) if step % 2 == 0 else hidden).square().mean().backward()
        optimizer.step()
    return [one.detach().cpu() for one in (*read, *first.parameters(), *second.parameters())]


def test_a_loop_is_the_same_to_the_bit() -> None:
    plain, subject = trained(), Subject()
    with GradientsToNone().apply(subject, "none"):
        freed = trained()
    assert len(plain) == len(freed)
    assert all(torch.equal(one, other) for one, other in zip(plain, freed, strict=True))
    assert subject.incidents == []


def test_gradients_are_freed() -> None:
    first, second, optimizer = made()
    second(first(torch.ones(2, 5, device="cuda"))).sum().backward()
    before = torch.cuda.memory_allocated()
    with GradientsToNone().apply(Subject(), "none"):
        optimizer.zero_grad(set_to_none=False)
        assert torch.cuda.memory_allocated() < before
        assert first.weight.grad is not None
        assert first.weight.grad.is_cuda
        assert not first.weight.grad.any()


@pytest.mark.parametrize("where", ["capture", "stream"])
def test_in_a_capture_or_another_stream_they_are_set_to_zero(where: str) -> None:
    first, _, optimizer = made()
    first(torch.ones(2, 5, device="cuda")).sum().backward()
    place = first.weight.grad.data_ptr() if first.weight.grad is not None else 0
    torch.cuda.synchronize()
    context: Any = (
        torch.cuda.graph(torch.cuda.CUDAGraph()) if where == "capture" else torch.cuda.stream(torch.cuda.Stream())
    )
    with GradientsToNone().apply(Subject(), "none"):
        with context:
            optimizer.zero_grad(set_to_none=False)
        torch.cuda.synchronize()
        assert first.weight.grad is not None
        assert first.weight.grad.data_ptr() == place
