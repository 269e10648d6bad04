"""A watched loop cannot tell that it is watched: its own patches, what it drops, hook numbers, tracebacks."""

from __future__ import annotations

import gc
import traceback
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, TensorDataset

from flatout.script.describe import observe
from flatout.script.runner import Runner


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def test_a_scripts_own_counters_count_every_call(runner: Runner) -> None:
    counts = {"call": 0, "backward": 0, "next": 0}
    iterators = torch.utils.data.dataloader._BaseDataLoaderIter
    places = (
        (nn.Module, "__call__", "call"),
        (torch.autograd, "backward", "backward"),
        (iterators, "__next__", "next"),
    )
    originals = [getattr(owner, name) for owner, name, _ in places]

    def counted(kind: str, original: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            counts[kind] += 1
            return original(*args, **kwargs)

        return wrapper

    for (owner, name, kind), original in zip(places, originals, strict=True):
        setattr(owner, name, counted(kind, original))
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for (x,) in DataLoader(TensorDataset(torch.randn(400, 3)), 4):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    for (owner, name, _), original in zip(places, originals, strict=True):
        setattr(owner, name, original)
    assert counts == {"call": 4 * 100, "backward": 100, "next": 101}
    del originals, original
    runner.ended()
    assert runner.record.steps == 100


def test_nothing_keeps_what_the_script_drops(runner: Runner) -> None:
    def one_fold() -> list[weakref.ref[Any]]:
        model, loader = net(), DataLoader(TensorDataset(torch.randn(8, 3)), 4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        iterator = iter(loader)
        for (x,) in iterator:
            model(x).sum().backward()
            optimizer.step()
        return [weakref.ref(one) for one in (model, loader, iterator, x, model[0].weight)]

    def failing_step() -> list[weakref.ref[Any]]:
        held = net()

        def closure() -> float:
            raise ValueError(held)

        optimizer = torch.optim.SGD(net().parameters(), 0.1)
        with pytest.raises(ValueError, match="Sequential"):
            optimizer.step(closure)
        return [weakref.ref(held)]

    references = one_fold() + failing_step()
    gc.collect()
    assert [one() for one in references] == [None] * len(references)


def test_hooks_keep_their_numbers_and_printed_tracebacks_their_lines(runner: Runner) -> None:
    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("forward")

    before = torch.utils.hooks.RemovableHandle.next_id
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert torch.utils.hooks.RemovableHandle.next_id == before
    try:
        nn.Sequential(Broken())(torch.ones(2, 3))
    except ValueError:
        assert "flatout" not in traceback.format_exc().replace(__file__, "")


def test_a_function_mode_of_the_script_sees_nothing_of_ours(runner: Runner) -> None:
    class Listed(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(str(func))
            return func(*args, **(kwargs or {}))

    def train() -> list[str]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        called.clear()
        with Listed():
            for _ in range(60):
                optimizer.zero_grad()
                model(torch.ones(2, 3)).sum().backward()
                optimizer.step()
            if runner.watch.enabled:
                observe(runner.watch, threads_at_start=None, rows=())
        return [*called]

    called: list[str] = []
    watched = train()
    runner.watch.uninstall()
    assert train() == watched
