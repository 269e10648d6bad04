"""`fit` with all its parts, ended at many points and started again: everything is that of an undisturbed run."""

from __future__ import annotations

import csv
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from flatout.checkpoint.folder import Checkpoints
from flatout.data.batches import batches
from flatout.train.evaluate import evaluate
from flatout.train.fit import FitResult, fit
from flatout.train.loggers import CSVLog
from flatout.train.loss import supervised
from flatout.train.patience import Patience
from flatout.train.step import TrainStep

EPOCHS = 6
X = torch.randn(50, 6, generator=torch.Generator().manual_seed(4))
Y = X[:, :3].argmax(1)
Y[::7] = -100  # ragged: batches differ in their terms


class Batches:
    """Batches in an order drawn from torch's generator, with noise from it too."""

    def __iter__(self) -> Any:
        order = torch.randperm(50)
        for start in range(0, 50, 8):
            rows = order[start : start + 8]
            yield X[rows] + 0.01 * torch.randn(len(rows), 6), Y[rows]


DATA: dict[str, Callable[[], Any]] = {
    "batches": lambda: batches((X, Y), 8, seed=5),
    "a loader": lambda: DataLoader(TensorDataset(X, Y), batch_size=8, shuffle=True),
    "an iterable": Batches,
}


@dataclass
class Everything:
    weights: list[torch.Tensor]
    average: list[torch.Tensor]
    schedule: dict[str, Any]
    rows: list[dict[str, str]]
    calls: list[Any]
    result: FitResult


class Crash(Exception):
    pass


def run(folder: Path, data: str, crash: Callable[[str, TrainStep], None] = lambda where, step: None) -> Everything:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-2)
    loss = supervised(nn.CrossEntropyLoss())

    def loss_fn(model: Any, batch: Any) -> Any:
        crash("in a step", step)
        return loss(model, batch), {"spread": batch[0].std()}

    step = TrainStep(model, optimizer, loss_fn, count_terms=loss.count_terms)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    calls: list[Any] = []

    def after_step(step: TrainStep, loss: Any) -> None:
        calls.append(step.steps)
        crash("after a step", step)

    def after_epoch(step: TrainStep, epoch: int, figures: Any) -> None:
        calls.append(("epoch", epoch, figures))
        crash("after an epoch", step)

    def evaluation() -> dict[str, float]:
        crash("in an evaluation", step)
        figures = evaluate(ema, [(X, Y)], loss.metrics)
        return figures | {"noise": float(torch.rand(()))}

    torch.manual_seed(11)
    result = fit(
        step,
        DATA[data](),
        epochs=EPOCHS,
        evaluation=evaluation,
        metric="noise",
        checkpoints=Checkpoints(folder / "run"),
        save_every_steps=3,
        after_step=after_step,
        after_epoch=after_epoch,
        epoch_scheduler=scheduler,
        ema=ema,
        patience=3,
        loggers=[CSVLog(folder / "log.csv")],
    )
    rows = list(csv.DictReader((folder / "log.csv").read_text().splitlines()))
    tensors = [[one.detach().clone() for one in module.state_dict().values()] for module in (model, ema)]
    return Everything(*tensors, scheduler.state_dict(), rows, calls, result)


def assert_same(found: Everything, expected: Everything) -> None:
    for ours, theirs in ((found.weights, expected.weights), (found.average, expected.average)):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert found.schedule == expected.schedule
    assert found.rows == expected.rows
    assert (found.result.epochs, found.result.ended) == (expected.result.epochs, expected.result.ended)
    assert (found.result.loss, found.result.figures) == (expected.result.loss, expected.result.figures)


@pytest.mark.parametrize("data", DATA)
def test_ended_anywhere_and_started_again_it_is_the_same_run(tmp_path: Path, data: str) -> None:
    expected = run(tmp_path / "whole", data)
    assert expected.result.ended == "patience"
    assert 2 < expected.result.epochs < EPOCHS
    last = expected.result.epochs * 7
    assert [row["step"] for row in expected.rows if row["batch_loss"]] == [str(i + 1) for i in range(last)]
    assert [row["epoch"] for row in expected.rows if row["epoch"]] == [str(i + 1) for i in range(last // 7)]
    points = [("in a step", 2), ("in an evaluation", 7), ("in a step", 9), ("after a step", 13), ("after a step", 14)]
    points += [("after an epoch", 14), ("in an evaluation", 21), ("signal", 23)]
    starts = 0

    def crash(where: str, step: TrainStep) -> None:
        if points and (where, step.steps) == points[0]:
            points.pop(0)
            raise Crash
        if points and points[0] == ("signal", step.steps) and where == "after a step":
            points.pop(0)
            os.kill(os.getpid(), signal.SIGTERM)

    points = [one for one in points if one[1] <= last]
    while True:
        starts += 1
        try:
            found = run(tmp_path / "parts", data, crash)
            break
        except (Crash, SystemExit):
            continue
    assert starts > 5
    assert_same(found, expected)
    again = run(tmp_path / "parts", data)
    assert (again.result.steps, again.result.ended) == (0, "patience")
    assert again.rows == expected.rows


def plain(**options: Any) -> tuple[TrainStep, Any]:
    torch.manual_seed(3)
    model = nn.Linear(6, 3)
    loss_fn = options.pop("loss_fn", supervised(nn.CrossEntropyLoss()))
    return TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn, **options), batches((X, Y), 8)


def test_the_users_functions_are_called_in_order_and_an_exception_saves(tmp_path: Path) -> None:
    calls: list[str] = []
    step, source = plain()

    def stop_when(figures: dict[str, float]) -> bool:
        calls.append(f"stop_when {sorted(figures)}")
        if len(calls) > 17:
            raise Crash
        return False

    with pytest.raises(Crash):
        fit(
            step,
            source,
            epochs=3,
            after_step=lambda step, loss: calls.append(f"step {step.steps}"),
            after_epoch=lambda step, epoch, figures: calls.append(f"epoch {epoch}"),
            stop_when=stop_when,
            checkpoints=tmp_path,
        )
    epoch = [*(f"step {i + 1}" for i in range(7)), "epoch 1", "stop_when ['train_loss']"]
    assert calls[:9] == epoch
    assert calls[9:] == [*(f"step {i + 8}" for i in range(7)), "epoch 2", "stop_when ['train_loss']"]
    again, source = plain()
    found = fit(again, source, epochs=2, checkpoints=tmp_path)
    assert (found.resumed_at_step, found.steps, found.ended) == (14, 0, "epochs")


def test_stop_when_ends_a_run_and_is_asked_again_at_the_next_start(tmp_path: Path) -> None:
    step, source = plain()
    found = fit(step, source, epochs=3, stop_when=lambda figures: True, checkpoints=tmp_path)
    assert (found.epochs, found.ended) == (1, "stop_when")
    step, source = plain()
    found = fit(step, source, epochs=3, stop_when=lambda figures: figures["train_loss"] > 0, checkpoints=tmp_path)
    assert (found.steps, found.ended) == (0, "stop_when")
    step, source = plain()
    found = fit(step, source, epochs=2, stop_when=lambda figures: False, checkpoints=tmp_path)
    assert (found.steps, found.epochs, found.ended) == (7, 2, "epochs")
    fit(step, source, epochs=3, stop_when=lambda figures: True, checkpoints=tmp_path)
    assert fit(step, source, epochs=4, checkpoints=tmp_path).ended == "epochs"


def test_means_of_an_epoch_are_weighted_by_terms() -> None:
    def loss_fn(model: Any, batch: Any) -> Any:
        inner = supervised(nn.CrossEntropyLoss())(model, batch)
        return inner * 0 + batch[0].mean(), {"double": 2 * batch[0].mean()}

    step, _ = plain(loss_fn=loss_fn)
    found = fit(step, batches((X, Y), 8), epochs=1)  # the last batch has 2 samples
    assert found.loss == pytest.approx(float(X.mean()), abs=1e-6)
    assert found.figures == pytest.approx({"double": 2 * float(X.mean())}, abs=1e-6)
    step, _ = plain(loss_fn=loss_fn, count_terms=lambda batch: 0 if len(batch[0]) == 8 else 2)
    found = fit(step, batches((X, Y), 8, shuffle=False), epochs=1)
    assert found.loss == pytest.approx(float(X[48:].mean()), abs=1e-6)


def test_steps_that_end_with_the_epoch_end_the_epoch_too() -> None:
    step, source = plain()
    epochs: list[int] = []
    fit(step, source, steps=14, after_epoch=lambda step, epoch, figures: epochs.append(epoch))
    assert epochs == [1, 2]


def test_schedules_of_epochs(tmp_path: Path) -> None:
    step, source = plain()
    schedule = torch.optim.lr_scheduler.StepLR(step.optimizer, 1, gamma=0.5)
    rates: list[float] = []
    fit(
        step,
        source,
        epochs=2,
        epoch_scheduler=schedule,
        checkpoints=tmp_path,
        after_epoch=lambda step, epoch, figures: rates.append(schedule.get_last_lr()[0]),
    )
    again, source = plain()
    schedule = torch.optim.lr_scheduler.StepLR(again.optimizer, 1, gamma=0.5)
    fit(
        again,
        source,
        epochs=3,
        epoch_scheduler=schedule,
        checkpoints=tmp_path,
        after_epoch=lambda step, epoch, figures: rates.append(schedule.get_last_lr()[0]),
    )
    assert rates == [0.05, 0.025, 0.0125]


def test_patience_of_its_own_direction(tmp_path: Path) -> None:
    values = iter([1.0, 3.0, 3.05, float("nan"), 9.0])
    step, source = plain()
    found = fit(
        step,
        source,
        epochs=9,
        evaluation=lambda: {"score": next(values)},
        metric="score",
        patience=Patience(epochs=2, best="max", least_gain=0.1),
        checkpoints=tmp_path,
    )
    assert (found.epochs, found.ended) == (4, "patience")
    best = Checkpoints(tmp_path, best="max").best()
    assert best is not None
    assert best.metric == 3.05
