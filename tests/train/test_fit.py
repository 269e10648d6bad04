"""`fit` with everything on: dropout, shuffling, a schedule, accumulation, fp16's scaling; killed, stopped, resumed."""

from __future__ import annotations

import csv
import json
import os
import random
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flatout.checkpoint.capturing import capture
from flatout.checkpoint.folder import Checkpoints
from flatout.data.batches import batches
from flatout.errors import UsageError
from flatout.plan import Plan
from flatout.train.evaluate import evaluate
from flatout.train.fit import FitResult, fit
from flatout.train.loss import supervised
from flatout.train.step import TrainStep
from tests.processes import Python

SAMPLES, EPOCHS = 50, 3


def parts(batch_size: int = 8, plan: Plan | None = None) -> tuple[TrainStep, Any]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=100)
    x = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(4))
    step = TrainStep(
        model,
        optimizer,
        supervised(nn.CrossEntropyLoss()),
        plan or Plan(precision="fp16", micro_batches=2),
        clip_norm=1.0,
        scheduler=scheduler,
    )
    return step, batches((x, x[:, :3].argmax(1)), batch_size, seed=5)


def weights(step: TrainStep) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in step.model.parameters()]


def undisturbed() -> list[torch.Tensor]:
    step, source = parts()
    fit(step, source, epochs=EPOCHS)
    return weights(step)


def test_what_it_did_is_what_it_says() -> None:
    step, source = parts(plan=Plan())
    metrics = supervised(nn.CrossEntropyLoss()).metrics
    held_out = batches((torch.randn(20, 6), torch.zeros(20, dtype=torch.long)), 20, shuffle=False)
    found = fit(step, source, epochs=EPOCHS, evaluation=lambda: evaluate(step.model, held_out, metrics))
    assert (found.steps, found.epochs, found.skipped, found.resumed_at_step) == (21, 3, 0, None)
    assert [set(figures) for figures in found.evaluations] == [{"loss", "accuracy"}] * 3
    assert found.loss is not None
    assert found.loss < 1.0
    assert json.loads(json.dumps(found.to_json()))["steps"] == 21


def test_steps_end_a_run_within_an_epoch_and_it_goes_on_from_there(tmp_path: Path) -> None:
    for total in (4, 5, 10, 21):
        step, source = parts()
        fit(step, source, epochs=EPOCHS, steps=total, checkpoints=Checkpoints(tmp_path))
        assert step.steps == total
    assert all(torch.equal(a, b) for a, b in zip(weights(step), undisturbed(), strict=True))
    step, source = parts()
    done = fit(step, source, epochs=EPOCHS, checkpoints=Checkpoints(tmp_path))
    assert (done.steps, done.resumed_at_step) == (0, 21)


PROGRAM = """
import sys, time
sys.path.insert(0, {here!r}), sys.path.insert(0, {root!r})
import torch
torch.set_num_threads(1)
from flatout.train.loggers import CSVLog
from test_fit import parts, weights, fit, Checkpoints, EPOCHS
step, source = parts()
inner = step.loss_fn
def slow(model, batch):
    time.sleep(0.004)
    return inner(model, batch)
step.loss_fn, step.count_terms = slow, inner.count_terms
print("begins", flush=True)
checkpoints = Checkpoints({folder!r}, asynchronous={background})
fit(step, source, epochs=EPOCHS, checkpoints=checkpoints, save_every_steps=1, loggers=[CSVLog({folder!r} + ".csv")])
torch.save(weights(step), {out!r})
"""


@pytest.mark.parametrize("background", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_kills_at_any_moment_leave_the_same_weights(tmp_path: Path, background: bool, python: Python) -> None:
    folder, out = tmp_path / "run", tmp_path / "weights.pt"
    program = PROGRAM.format(
        here=str(Path(__file__).parent),
        root=str(Path(__file__).parents[2]),
        folder=str(folder),
        out=str(out),
        background=background,
    )
    chance = random.Random(background)
    for _ in range(5):
        read, write = os.pipe()
        with open(read, "rb") as said, open(write, "wb") as out_of_child, tempfile.TemporaryFile() as err:
            child = python.start("-c", program, stdout=out_of_child, stderr=err)
            assert said.readline() == b"begins\n"
            time.sleep(chance.uniform(0.0, 0.25))
            child.kill()
            child.wait()
    ended = python("-c", program)
    assert ended.returncode == 0, ended.stderr
    for ours, expected in zip(torch.load(out), undisturbed(), strict=True):
        assert torch.equal(ours, expected)
    rows = list(csv.DictReader((tmp_path / "run.csv").read_text().splitlines()))
    assert [row["step"] for row in rows if row["batch_loss"]] == [str(i + 1) for i in range(21)]
    assert [row["epoch"] for row in rows if row["epoch"]] == ["1", "2", "3"]


def test_sigterm_saves_and_leaves(tmp_path: Path) -> None:
    step, source = parts()

    def evaluation() -> dict[str, float]:
        os.kill(os.getpid(), signal.SIGTERM)
        return {"loss": 1.0}

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as left:
        fit(step, source, epochs=EPOCHS, evaluation=evaluation, checkpoints=Checkpoints(tmp_path))
    assert left.value.code == 143
    assert signal.getsignal(signal.SIGTERM) == before
    again, source = parts()
    found = fit(again, source, epochs=EPOCHS, checkpoints=Checkpoints(tmp_path))
    assert found.resumed_at_step == 7  # the evaluation under way ended, and the epoch was saved with its figures
    assert all(torch.equal(a, b) for a, b in zip(weights(again), undisturbed(), strict=True))


def test_a_run_goes_on_with_another_batch_size(tmp_path: Path) -> None:
    step, source = parts(batch_size=8)
    fit(step, source, epochs=1, steps=3, checkpoints=Checkpoints(tmp_path))
    step, source = parts(batch_size=13)
    found = fit(step, source, epochs=1, checkpoints=Checkpoints(tmp_path))
    assert found.steps == 2  # the other 26 samples


def test_bad_input_is_named(tmp_path: Path) -> None:
    step, source = parts()
    with pytest.raises(UsageError, match="neither epochs nor steps"):
        fit(step, source)
    with pytest.raises(UsageError, match="epochs is 0"):
        fit(step, source, epochs=0)
    fit(step, source, epochs=1, checkpoints=Checkpoints(tmp_path))
    other = nn.Linear(6, 3)
    other_step = TrainStep(other, torch.optim.AdamW(other.parameters()), supervised(nn.CrossEntropyLoss()))
    with pytest.raises(UsageError, match=r"the checkpoint does not fit: .*; build step, data and objects as they were"):
        fit(other_step, source, epochs=2, checkpoints=Checkpoints(tmp_path))
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(step.optimizer)
    with pytest.raises(UsageError, match="epoch_scheduler reads 'loss', and there is no evaluation"):
        fit(step, source, epochs=2, epoch_scheduler=plateau)
    with pytest.raises(
        UsageError, match=r"metric is 'train_lss'; the figures of an epoch are 'train_loss'; name one of these$"
    ):
        fit(step, source, epochs=9, epoch_scheduler=plateau, metric="train_lss")
    assert isinstance(fit(step, source, epochs=2), FitResult)


class Drifting:
    """An object of the user's that every step changes."""

    def __init__(self) -> None:
        self.value = 0.0

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


def followed(total: int, folder: Path) -> tuple[torch.Tensor, float]:
    step, source = parts(plan=Plan())
    average = torch.optim.swa_utils.AveragedModel(step.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn())
    drifting, inner = Drifting(), step.loss_fn

    def loss_fn(model: Any, batch: Any) -> Any:
        average.update_parameters(model)
        drifting.value = 0.9 * drifting.value + float(batch[0].sum())
        return inner(model, batch)

    step.loss_fn = loss_fn
    fit(step, source, epochs=EPOCHS, steps=total, checkpoints=folder, objects={"ema": average, "drift": [drifting]})
    return torch.cat([one.flatten() for one in average.parameters()]), drifting.value


def test_further_objects_are_saved_and_taken_up(tmp_path: Path) -> None:
    whole = followed(21, tmp_path / "whole")
    followed(9, tmp_path / "parts")
    average, value = followed(21, tmp_path / "parts")
    assert torch.equal(average, whole[0])
    assert value == whole[1]
    step, source = parts(plan=Plan())
    with pytest.raises(UsageError, match="1 unexpected: objects"):
        fit(step, source, epochs=EPOCHS, checkpoints=tmp_path / "parts")
    with pytest.raises(
        UsageError, match=r"1 missing: objects\['swa'\]; 2 unexpected: objects\['ema'\], objects\['drift'\]"
    ):
        fit(step, source, epochs=EPOCHS, checkpoints=tmp_path / "parts", objects={"swa": Drifting()})


def test_a_run_saved_by_the_first_version_goes_on(tmp_path: Path) -> None:
    step, source = parts()
    fit(step, source, epochs=1)
    old = capture(model=step.model, optimizer=step.optimizer, scheduler=step.scheduler, data=source)
    Checkpoints(tmp_path).save({**old, "extra": {"step": step.state_dict()}}, step=7)
    again, source = parts()
    assert fit(again, source, epochs=EPOCHS, checkpoints=tmp_path).resumed_at_step == 7
    assert all(torch.equal(a, b) for a, b in zip(weights(again), undisturbed(), strict=True))


def test_a_metric_that_the_evaluation_does_not_give_is_refused(tmp_path: Path) -> None:
    step, source = parts()
    checkpoints = Checkpoints(tmp_path, best="max")

    def evaluation() -> dict[str, Any]:
        return {"loss": torch.tensor(1.0), "accuracy": 0.5}

    with pytest.raises(UsageError, match=r"metric is 'acc'; .* 'train_loss', 'loss', 'accuracy'; name one"):
        fit(step, source, epochs=EPOCHS, evaluation=evaluation, metric="acc", checkpoints=checkpoints)
    found = fit(step, source, epochs=2, evaluation=evaluation, metric="accuracy", checkpoints=checkpoints)
    assert (found.resumed_at_step, found.evaluations) == (7, ({"loss": 1.0, "accuracy": 0.5},))
    best = checkpoints.best()
    assert best is not None
    assert (best.step, best.metric) == (14, 0.5)
    with pytest.raises(UsageError, match=r"whether the highest or the lowest is best .*best='max'\)"):
        fit(step, source, epochs=3, evaluation=evaluation, metric="accuracy", checkpoints=tmp_path)


def test_a_stream_that_runs_dry_ends_the_run() -> None:
    x = torch.randn(40, 6)
    rows = [(one, one[:3].argmax()) for one in x]
    step, _ = parts(plan=Plan())
    with pytest.raises(
        UsageError, match="yielded no batch in epoch 1; an iterator is exhausted after one epoch; pass an object"
    ):
        fit(step, batches(iter(rows), 10), steps=50)
    assert step.steps == 4
    with pytest.raises(UsageError, match="epochs is 3, and the data is an iterator; it can be read only once"):
        fit(step, batches(iter(rows), 10), epochs=3)
    assert fit(step, batches(iter(rows), 10), epochs=1).steps == 4
    with pytest.raises(UsageError, match="yielded no batch in epoch 0; an epoch has at least one batch"):
        fit(step, batches(Empty(), 10), epochs=1)


class Empty(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


def test_a_training_metric_of_an_epoch_that_did_not_end(tmp_path: Path) -> None:
    step, source = parts(plan=Plan())
    data = batches((torch.randn(20, 6), torch.zeros(20, dtype=torch.long)), 20, shuffle=False)
    options: dict[str, Any] = {"metric": "train_loss", "evaluation": lambda: evaluate(step, data)}
    found = fit(step, source, steps=10, checkpoints=tmp_path, **options)
    assert (found.steps, found.ended) == (10, "steps")
    assert Checkpoints(tmp_path).load() is not None


def test_ranks_that_find_different_checkpoints_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit(*parts(), epochs=1, checkpoints=tmp_path)
    step, source = parts()
    found: list[Any] = []

    def gathered(here: Any, group: object) -> list[Any]:
        found.append(here)
        return [here, ("none", {})]

    monkeypatch.setattr("flatout.train.fit_run.gathered", gathered)
    with pytest.raises(UsageError, match=r"different checkpoints \(rank 0: 000001-step-7, rank 1: none\); .*share"):
        fit(step, source, epochs=2, checkpoints=tmp_path)
    assert step.steps == 0
    (tmp_path / "000001-step-7" / "state.json").unlink()
    with pytest.raises(UsageError, match="is whole: 000001-step-7 was skipped"):  # and the other ranks know
        fit(step, source, epochs=2, checkpoints=tmp_path)
    assert [name[:13] for name, _ in found] == ["000001-step-7", "no checkpoint"]
