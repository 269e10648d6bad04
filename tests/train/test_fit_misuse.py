"""Misuse of `fit` that must not pass silently: a lost epoch, no training, logged numbers that are not the step's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flatout.checkpoint.capturing import capture
from flatout.checkpoint.folder import Checkpoints
from flatout.data.batches import batches
from flatout.errors import MachineError, UsageError
from flatout.plan import Plan
from flatout.train.evaluate import evaluate
from flatout.train.fit import FitResult, fit
from flatout.train.loggers import CSVLog
from flatout.train.step import TrainStep

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def training(loss_fn: Any = lambda model, batch: model(batch).square().mean()) -> TrainStep:
    model = Scaled()
    return TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn)


class Rows:
    def __init__(self) -> None:
        self.found: list[Mapping[str, float]] = []

    def log(self, figures: Mapping[str, float], step: int) -> None:
        if "batch_loss" in figures:
            self.found.append(figures)


def test_a_parameter_as_a_figure_is_logged_as_it_was() -> None:
    def loss_fn(model: Scaled, batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        before.append(model.scale.item())
        return model(batch).square().mean(), {"scale": model.scale}

    before: list[float] = []
    rows = Rows()
    fit(training(loss_fn), batches(X, 4), epochs=2, loggers=[rows])
    assert [row["batch_scale"] for row in rows.found] == before
    assert len(set(before)) == 6


def test_a_figure_with_the_name_of_the_loss_is_refused() -> None:
    def loss_fn(model: nn.Module, batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = model(batch).square().mean()
        return loss + 100, {"loss": loss}

    step = training(loss_fn)
    with pytest.raises(UsageError, match="a figure named 'loss'; that is the name of the loss itself; give it another"):
        step(X)
    with pytest.raises(UsageError, match="a figure named 'loss'"):
        evaluate(step, batches(X, 4, shuffle=False))


def test_data_that_another_training_has_used_up_is_refused() -> None:
    source, first = batches(X, 4), training()
    fit(first, source, epochs=2)
    assert fit(first, source, epochs=2).steps == 0  # this one has trained on it
    with pytest.raises(UsageError, match="the data is at the end of epoch 2, and this step has taken no step"):
        fit(training(), source, epochs=2)


@pytest.mark.parametrize(
    "value", [np.zeros((2, 2)), None, "high", torch.zeros(2)], ids=["array", "none", "text", "two"]
)
def test_an_evaluation_that_returns_no_number_loses_no_epoch(tmp_path: Path, value: Any) -> None:
    with pytest.raises(UsageError, match=r"evaluation returned .* as the figure 'bad'; a figure is a single number"):
        fit(training(), batches(X, 4), epochs=3, evaluation=lambda: {"bad": value}, checkpoints=tmp_path)
    done = fit(training(), batches(X, 4), epochs=3, evaluation=lambda: {"loss": 1.0}, checkpoints=tmp_path)
    assert done.resumed_at_step == 3


def test_a_run_is_ranked_by_one_metric(tmp_path: Path) -> None:
    figures = {"loss": 2.0, "accuracy": 0.5}

    def trained(epochs: int, metric: str, best: Any) -> None:
        where = Checkpoints(tmp_path, best=best)
        fit(training(), batches(X, 4), epochs=epochs, evaluation=lambda: figures, metric=metric, checkpoints=where)

    trained(1, "loss", "min")
    for metric, best in (("accuracy", "max"), ("loss", "max")):
        with pytest.raises(UsageError, match="ranked by 'loss', the lowest first; rank by the same"):
            trained(2, metric, best)
    trained(2, "loss", "min")


def test_a_run_that_was_not_ranked_may_be_ranked_later(tmp_path: Path) -> None:
    fit(training(), batches(X, 4), epochs=1, checkpoints=Checkpoints(tmp_path, best="min"))
    where = Checkpoints(tmp_path, best="max")
    fit(training(), batches(X, 4), epochs=2, evaluation=lambda: {"f1": 0.5}, metric="f1", checkpoints=where)


@pytest.mark.parametrize("name", ["source", "strict", "extra", "step", "data", "generators", "objects"])
def test_objects_that_could_not_be_restored_are_refused_before_training(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=f"an object is named '{name}'"):
        fit(training(), batches(X, 4), epochs=1, objects={name: nn.Linear(1, 1)}, checkpoints=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_loss_may_take_its_targets_out_of_the_batch() -> None:
    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return (model(batch["x"]) - batch.pop("y")).square().mean()

    step = training(loss_fn)
    step.count_terms = lambda batch: batch["y"].numel()
    data = [{"x": X[:4], "y": X[4:8]}, {"x": X[:2], "y": X[2:4]}]
    assert fit(step, data, epochs=1).steps == 2


def test_logs_are_known_by_their_files(tmp_path: Path) -> None:
    def logs(*names: str) -> list[CSVLog]:
        return [CSVLog(tmp_path / name, every=1 if name == "a.csv" else 1000) for name in names]

    where = tmp_path / "run"
    fit(training(), batches(X, 4), epochs=2, loggers=logs("a.csv", "b.csv"), checkpoints=where)
    rows = (tmp_path / "a.csv").read_text()
    fit(training(), batches(X, 4), epochs=2, loggers=logs("b.csv", "a.csv"), checkpoints=where)
    assert (tmp_path / "a.csv").read_text() == rows


def test_a_log_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a folder; CSVLog writes a file"):
        CSVLog(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(MachineError, match=r"file/log\.csv cannot be written: "):
        fit(training(), batches(X, 4), epochs=1, loggers=[CSVLog(tmp_path / "file" / "log.csv")])


def halved(epochs: int, evaluation: Any, folder: Path | None, **options: Any) -> tuple[float, FitResult]:
    step = training()
    scheduler = torch.optim.lr_scheduler.StepLR(step.optimizer, 1, 0.5)
    done = fit(
        step,
        batches(X, 4),
        epochs=epochs,
        evaluation=evaluation,
        checkpoints=folder,
        epoch_scheduler=scheduler,
        **options,
    )
    return step.optimizer.param_groups[0]["lr"], done


@pytest.mark.parametrize(
    "wrong", [KeyError("of the user's"), "no dict", {"loss": None}], ids=["raised", "text", "none"]
)
@pytest.mark.parametrize("patience", [None, 5])
def test_an_epoch_whose_evaluation_fails_is_saved_and_evaluated_again(
    tmp_path: Path, wrong: Any, patience: int | None
) -> None:
    def fails() -> Any:
        if isinstance(wrong, Exception):
            raise wrong
        return wrong

    with pytest.raises((KeyError, UsageError)):
        halved(3, fails, tmp_path, patience=patience)
    rate, done = halved(3, lambda: {"loss": 1.0}, tmp_path, patience=patience)
    assert (done.resumed_at_step, done.steps, len(done.evaluations)) == (3, 6, 3)
    assert rate == 0.1 * 0.5**3
    whole = halved(3, lambda: {"loss": 1.0}, None)[1]
    assert done.loss == whole.loss


def test_a_wrong_metric_is_refused_where_nothing_is_ranked_by_it() -> None:
    """A run without checkpoints and patience would end as if the name were right."""
    with pytest.raises(UsageError, match=r"^metric is 'acc', and there is no evaluation; .*; pass evaluation, or metr"):
        fit(training(), batches(X, 4), epochs=1, metric="acc")
    with pytest.raises(UsageError, match=r"^metric is 'acc'; the figures of an epoch are 'train_loss', 'accuracy'; na"):
        fit(training(), batches(X, 4), epochs=1, metric="acc", evaluation=lambda: {"accuracy": 0.5})
    with pytest.raises(UsageError, match=r"^metric is 'train_lss'; the figures of an epoch are 'train_loss'; name one"):
        fit(training(), batches(X, 4), epochs=1, metric="train_lss")
    for metric in ("train_loss", "accuracy"):
        fit(training(), batches(X, 4), epochs=1, metric=metric, evaluation=lambda: {"accuracy": 0.5})
    fit(training(), batches(X, 4), epochs=1, evaluation=lambda: {"accuracy": 0.5})


def test_an_epoch_without_the_metric_is_evaluated_again(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="metric is 'loss'; the figures of an epoch are 'train_loss', 'error'"):
        halved(2, lambda: {"error": 1.0}, tmp_path, patience=3)
    rate, done = halved(2, lambda: {"loss": 1.0}, tmp_path, patience=3)
    assert (rate, len(done.evaluations)) == (0.1 * 0.5**2, 2)


def test_a_scheduler_is_stepped_in_one_place() -> None:
    model = Scaled()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    step = TrainStep(model, optimizer, lambda model, batch: model(batch).square().mean(), scheduler=scheduler)
    with pytest.raises(
        UsageError, match=r"the step's scheduler, a StepLR, is the epoch_scheduler too; .*one of the two"
    ):
        fit(step, batches(X, 4), epochs=1, epoch_scheduler=scheduler)


class Unstorable:
    def state_dict(self) -> Any:
        return {"place": Path("a")}

    def load_state_dict(self, state: Any) -> None: ...


def test_what_cannot_be_saved_is_refused_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = training()
    with pytest.raises(UsageError, match=r"state\['objects'\]\['own'\]\['place'\] is of type pathlib"):
        fit(step, batches(X, 4), epochs=1, objects={"own": Unstorable()}, checkpoints=tmp_path / "a")
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(UsageError, match=f"checkpoints cannot be written to .*b: {tmp_path} may not be written"):
        fit(step, batches(X, 4), epochs=1, checkpoints=tmp_path / "b")
    assert step.steps == 0


@pytest.mark.parametrize("extra", [7, "a note", [1], {"fit": 3}])
def test_a_checkpoint_of_a_loop_of_ones_own_is_continued(tmp_path: Path, extra: Any) -> None:
    step, source = training(), batches(X, 4)
    for batch in source:
        step(batch)
        break
    Checkpoints(tmp_path).save(capture(step, source, extra=extra), step=1)
    done = fit(training(), batches(X, 4), epochs=1, checkpoints=tmp_path)
    assert (done.resumed_at_step, done.steps) == (1, 2)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("terms", [torch.ones(2), "4", -1, float("nan"), torch.tensor(1j)], ids=str)
def test_terms_that_are_no_number_are_refused(terms: Any, parts: int) -> None:
    model = Scaled()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss_fn = lambda model, batch: model(batch).square().mean()  # noqa: E731
    step = TrainStep(model, optimizer, loss_fn, Plan(micro_batches=parts), count_terms=lambda batch: terms)
    with pytest.raises(UsageError, match=r"count_terms returned .*; it returns how many terms"):
        fit(step, batches(X, 4), epochs=1)
    step.count_terms = lambda batch: np.int64(4)
    assert fit(step, batches(X, 4), epochs=1).steps == 3


def test_complex_figures_are_refused() -> None:
    step = training(lambda model, batch: (model(batch).square().mean(), {"phase": torch.tensor(1j)}))
    with pytest.raises(UsageError, match=r"loss_fn returned a Tensor of shape .* as the figure 'phase'"):
        step(X)
    with pytest.raises(UsageError, match="metrics returned a Tensor as the figure 'phase'"):
        evaluate(step.model, [X], lambda model, batch: {"phase": torch.ones(12) * 1j})
