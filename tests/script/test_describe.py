"""What a run knows of a loop after its first step is enough for every lever that a trial has found to apply."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import ChainDataset, DataLoader, IterableDataset, Sampler, TensorDataset

from flatout.levers.catalogue import LEVERS
from flatout.levers.lever import Choice
from flatout.machine.detect import detect
from flatout.profiling.profile import evaluation_in_step
from flatout.script.describe import breakdown, names_device, observe
from flatout.script.runner import Runner
from flatout.script.spans import StepRow
from tests.odd_defaults import odd_defaults


@pytest.fixture
def runner() -> Iterator[Runner]:
    machine = replace(detect(), cpu=replace(detect().cpu, fast_dtypes=("bf16",), available_cores=4, physical_cores=4))
    made = Runner(machine=machine)
    made.watch.install(torch)
    yield made
    made.watch.uninstall()


class Counted(TensorDataset):
    """Tells that it was asked for its length, which `flatout run` has no business with."""

    asked = 0

    def __len__(self) -> int:
        self.asked += 1
        return super().__len__()


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(96, 3, 8, 8), torch.randint(0, 5, (96,))


def train(data: TensorDataset, steps: int) -> list[object]:
    """What must be kept, as the watch holds it weakly."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 9000), nn.Linear(9000, 5))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    loader = DataLoader(data, batch_size=4)
    for _, (x, y) in zip(range(steps), loader, strict=False):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return [model, optimizer, loader]


def test_every_lever_that_applies_in_a_trial_applies_in_the_run(runner: Runner) -> None:
    assert runner._machine is not None
    kept = train(TensorDataset(*samples()), 3)
    in_trial = observe(runner.watch, threads_at_start=runner.threads_at_start, rows=())
    applying = [lever for lever in LEVERS if lever.applies(runner._machine, in_trial)]
    assert {"batched fetch", "optimizer", "autocast", "channels_last"} <= {lever.name for lever in applying}
    runner._choices = [
        Choice(lever=lever, value=value)
        for lever in applying
        for value in lever.applies(runner._machine, in_trial).values
    ]
    assert runner._fitting() == runner._choices
    assert (runner.left_off, len(kept)) == ([], 3)


def test_a_run_asks_no_data_set_for_its_length(runner: Runner) -> None:
    data = Counted(*samples())
    kept = train(data, 2)
    data.asked = 0
    observe(runner.watch, threads_at_start=None, rows=(), lengths=False)
    assert (data.asked, len(kept)) == (0, 3)


@pytest.mark.parametrize("flushed", [True, False])
def test_a_script_that_flushes_denormals_is_seen_to_whatever_its_default_dtype(runner: Runner, flushed: bool) -> None:
    kept = train(TensorDataset(*samples()), 2)
    torch.set_flush_denormal(flushed)
    try:
        with odd_defaults():
            found = observe(runner.watch, threads_at_start=None, rows=())
    finally:
        torch.set_flush_denormal(False)
    assert (found.flush_denormals, len(kept)) == (flushed, 3)


def row(forward: float, backward: float, evaluation: float = 0.0) -> StepRow:
    parts = {"forward": forward, "backward": backward, "evaluation": evaluation, "other": 0.001}
    return StepRow(seconds=sum(parts.values()), parts=parts)


@pytest.mark.parametrize(
    ("rows", "inside"),
    [
        ([row(0.01, 0.02)] * 4, True),  # there is none
        ([row(0.01, 0.02, 0.05)] * 4, True),
        ([row(0.01, 0.02, 0.05), row(0.02, 0.02, 0.03), row(0.01, 0.01)], True),
        ([row(0.01, 0.02), row(0.02, 0.02), row(0.01, 0.01, 0.5), row(0.01, 0.03)], False),
        ([row(0.01, 0.02, 0.3), *[row(0.01, 0.02)] * 5, row(0.02, 0.02, 0.01)], False),
    ],
)
def test_the_parts_add_up_to_the_median_step_with_evaluation_where_it_has_some(
    rows: list[StepRow], inside: bool
) -> None:
    step = statistics.median(one.seconds for one in rows)
    parts = breakdown(rows)
    on_top = 0.0 if inside else parts["evaluation"]
    assert sum(parts.values()) - on_top == pytest.approx(step)
    assert evaluation_in_step(parts, step) is inside


def test_what_is_not_known_yet_to_be_called_in_every_step_is_no_evaluation() -> None:
    assert breakdown([row(0.01, 0.02, 0.3), *[row(0.31, 0.02)] * 5])["evaluation"] == 0.0


def test_a_source_that_is_nested_too_deeply_names_no_device(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"total = {' + '.join(['1'] * 6000)}\n")
    assert not names_device(str(tmp_path / "train.py"))


class Endless(Sampler[int]):
    """As for detection: it has no length."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield 0


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.randn(12, 3)


class Unknown(TensorDataset):
    def __len__(self) -> int:
        raise NotImplementedError("how many there are")


@pytest.mark.parametrize(
    ("loader", "samples"),
    [
        (lambda: DataLoader(TensorDataset(torch.randn(12, 3)), 4, sampler=Endless()), 12),
        (lambda: DataLoader(ChainDataset([Stream(), Stream()]), 4), None),
        (lambda: DataLoader(Unknown(torch.randn(12, 3)), 4, sampler=range(12)), None),
    ],
    ids=["sampler", "chain", "own"],
)
def test_data_without_a_length_is_described(runner: Runner, loader: Callable[[], Any], samples: int | None) -> None:
    model, loaded = nn.Linear(3, 1), loader()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _, batch in zip(range(2), loaded, strict=False):
        model(batch[0] if isinstance(batch, list) else batch).sum().backward()
        optimizer.step()
    (found,) = observe(runner.watch, threads_at_start=None, rows=()).loaders
    assert (found.samples, found.batches_per_epoch) == (samples, None)
