"""The starts of epochs are seen in a real loop, also where only steps are counted."""

from __future__ import annotations

import gc
import weakref

import torch
from torch.utils.data import DataLoader, TensorDataset

from flatout.script.describe import observe
from flatout.script.runner import Runner


def test_the_training_loader_s_iterators_are_told_also_while_suspended(runner: Runner) -> None:
    made: list[int] = []
    runner.watch.at_iterator.append(lambda loader, began: made.append(loader.num_workers))
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.DataLoader(torch.randn(12, 3), batch_size=4)
    for epoch in range(4):
        if epoch == 2:
            runner.watch.suspend(16)
        for batch in data:
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
    runner.ended()
    assert made == [0, 0, 0]  # in the first epoch nothing says yet what the loader is for
    assert runner.record.steps == 12
    assert runner.epochs.cost_seconds is not None
    assert runner.epochs.workers == 0


def test_a_loader_that_only_its_loop_knows_is_seen_and_goes_with_it(runner: Runner) -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = TensorDataset(torch.randn(100, 3))
    for (x,) in DataLoader(data, batch_size=5):
        model(x).mean().backward()
        optimizer.step()
        seen = observe(runner.watch, threads_at_start=None, rows=())
    assert [loader.samples for loader in seen.loaders] == [100]
    gone = weakref.ref(data)
    del data, x
    gc.collect()
    assert gone() is None
