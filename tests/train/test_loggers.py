"""Logs of a run: what is in them, and how they go back to a checkpoint."""

from __future__ import annotations

import csv
import logging
import os
import sys
import types
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from flatout.checkpoint.folder import Checkpoints
from flatout.data.batches import batches
from flatout.errors import MachineError, UsageError
from flatout.train.fit import fit
from flatout.train.loggers import CSVLog, TensorBoardLog
from flatout.train.loss import supervised
from flatout.train.step import TrainStep


def text(path: Path) -> list[str]:
    return path.read_text().split()


def test_columns_come_as_they_are_needed(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "log.csv"
    log = CSVLog(path, every=2)
    for step in range(1, 5):
        log.log({"batch_loss": step / 2, "lr": 0.1}, step)
    log.log({"epoch": 1, "train_loss": 1.25}, 4)
    assert text(path) == [
        "step,batch_loss,lr,epoch,train_loss",
        "2,1.0,0.1,,",
        "4,2.0,0.1,,",
        "4,,,1,1.25",
    ]
    assert path.stat().st_mode & 0o777 == 0o644
    assert [one.name for one in path.parent.iterdir()] == ["log.csv"]


def test_a_log_goes_back_to_its_state(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    log = CSVLog(path)
    log.log({"batch_loss": 1.0}, 1)
    state = log.state_dict()
    log.log({"batch_loss": 2.0}, 2)
    log.log({"epoch": 1}, 2)
    with path.open("a") as file:
        file.write("3,0.")  # a kill
    again = CSVLog(path)
    again.load_state_dict(state)
    assert text(path) == ["step,batch_loss", "1,1.0"]
    again.log({"batch_loss": 3.0}, 2)
    again.flush()
    assert text(path) == ["step,batch_loss", "1,1.0", "2,3.0"]
    path.unlink()
    with pytest.warns(UserWarning, match=r"log.csv has 0 of the 1 rows"):
        again.load_state_dict(state)


def test_another_run_keeps_the_file_before(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        CSVLog(tmp_path / "log.csv").log({"loss": value}, 1)
    assert text(tmp_path / "log.csv") == ["step,loss", "1,2.0"]
    assert text(tmp_path / "log.csv.old") == ["step,loss", "1,1.0"]


def trained(loggers: Any, **options: Any) -> TrainStep:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    x = torch.randn(40, 4)
    step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), supervised(nn.CrossEntropyLoss()))
    fit(step, batches((x, x[:, :3].argmax(1)), 8), epochs=2, loggers=loggers, **options)
    return step


class Anything:
    def __init__(self) -> None:
        self.rows: list[tuple[dict[str, float], int]] = []

    def log(self, figures: dict[str, float], step: int) -> None:
        self.rows.append((figures, step))


def test_anything_that_logs(tmp_path: Path) -> None:
    log = Anything()
    trained([log], evaluation=lambda: {"loss": 2.0})
    assert [step for _, step in log.rows] == [1, 2, 3, 4, 5, 5, 6, 7, 8, 9, 10, 10]
    assert set(log.rows[0][0]) == {"batch_loss", "lr"}
    figures, _ = log.rows[5]
    assert set(figures) == {"epoch", "train_loss", "loss"}
    losses = [one["batch_loss"] for one, _ in log.rows[:5]]
    assert figures["train_loss"] == pytest.approx(sum(losses) / 5)


def test_no_step_waits_for_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    to_list = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: read.append(self.numel()) or to_list(self))
    log = Anything()
    before: list[int] = []
    trained([log], after_step=lambda step, loss: before.append(len(read)))
    assert before[:5] == [0] * 5
    assert len(set(before[5:])) == 1  # at the end of the first epoch
    assert len([row for row, _ in log.rows if "batch_loss" in row]) == 10


def test_what_cannot_log_is_refused() -> None:
    for wrong, said in (
        (Anything(), r"a single logger; .*loggers=\[logger\]"),
        ([Anything], r"a logger is <class .*log\(figures, step\)"),
        (3, "loggers is 3; it is a list"),
    ):
        with pytest.raises(UsageError, match=said):
            trained(wrong)


class Writer:
    made: ClassVar[list[Writer]] = []

    def __init__(self, folder: str, purge_step: int | None = None) -> None:
        self.purge_step, self.rows, self.ended = purge_step, [], False
        Writer.made.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.rows.append((name, value, step))

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.ended = True


def test_tensorboard_hides_what_is_logged_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr(Writer, "made", [])
    log = TensorBoardLog(tmp_path)
    log.log({"batch_loss": 1.0}, 1)
    log.log({"batch_loss": 2.0}, 2)
    state = log.state_dict()
    log.log({"epoch": 1.0}, 2)
    again = TensorBoardLog(tmp_path)
    again.load_state_dict(state)
    again.log({"epoch": 1.0}, 2)
    first, second = Writer.made
    assert first.rows == [("batch_loss", 1.0, 1), ("batch_loss", 2.0, 2), ("epoch", 1.0, 2)]
    assert second.purge_step == 2
    assert second.rows == [("batch_loss", 2.0, 2), ("epoch", 1.0, 2)]
    again.close()
    assert second.ended


def test_without_tensorboard_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MachineError, match=r"tensorboard is not installed; .*pip install tensorboard"):
        TensorBoardLog(tmp_path)


def test_the_row_of_an_epoch_stays_whatever_its_figures_are_called(tmp_path: Path) -> None:
    log = CSVLog(tmp_path / "log.csv", every=2)
    log.log({"epoch": 1, "batch_loss": 0.5}, 3)
    assert text(tmp_path / "log.csv") == ["step,epoch,batch_loss", "3,1,0.5"]


class Failing(Anything):
    """Raises at one row; keeps a state."""

    def __init__(self, at: int, told: str = "the server is gone") -> None:
        super().__init__()
        self.at, self.told, self.flushed = at, told, 0

    def log(self, figures: dict[str, float], step: int) -> None:
        if len(self.rows) == self.at:
            raise ConnectionError(self.told)
        super().log(figures, step)

    def flush(self) -> None:
        self.flushed += 1


@pytest.mark.parametrize("at", [2, 5], ids=["a step", "an epoch"])
def test_a_logger_that_raises_costs_no_training(tmp_path: Path, at: int) -> None:
    other, failing = Anything(), Failing(at)
    with pytest.raises(ConnectionError, match="the server is gone"):
        trained([failing, other], checkpoints=tmp_path / "run", evaluation=lambda: {"loss": 1.0})
    assert failing.flushed
    assert [step for _, step in other.rows] == [1, 2, 3, 4, 5, 5]
    resumed, undisturbed = (
        trained([], checkpoints=where, evaluation=lambda: {"loss": 1.0}) for where in (tmp_path / "run", None)
    )
    assert torch.equal(resumed.model.weight, undisturbed.model.weight)  # type: ignore[arg-type]
    latest = Checkpoints(tmp_path / "run").at(5)
    assert latest.metric == 1.0


def test_a_flush_that_fails_hides_no_other_end(tmp_path: Path) -> None:
    class Unflushed(Failing):
        def flush(self) -> None:
            super().flush()
            raise ConnectionError(self.told)

    loggers = [Unflushed(-1), Failing(-1)]

    def evaluation() -> dict[str, float]:
        raise KeyError("of the user's")

    with pytest.warns(UserWarning, match="a logger failed: .*the server is gone"), pytest.raises(KeyError):
        trained(loggers, evaluation=evaluation)
    with pytest.raises(ConnectionError):
        trained(loggers)
    assert [one.flushed for one in loggers] == [2, 2]


@pytest.mark.parametrize("name", ["epoch", "step", "train_loss", 1])
def test_a_figure_with_a_name_of_the_logs_own_is_refused(tmp_path: Path, name: Any) -> None:
    log = Anything()
    with pytest.raises(
        UsageError, match=f"evaluation returned a figure named {name!r}; .*epoch, step, train_loss; give"
    ):
        trained([log], evaluation=lambda: {"loss": 1.0, name: 99.0}, checkpoints=tmp_path)
    assert Checkpoints(tmp_path).load() is not None


def test_what_cannot_be_called_with_figures_is_no_logger() -> None:
    class Short:
        def log(self, figures: dict[str, float]) -> None: ...

    with pytest.raises(UsageError, match=r"the log of a Short is log\(figures.*; it is called as log\(figures, step\)"):
        trained([Short()])
    with pytest.raises(UsageError, match=r"a logger is <.*Logger .*; it has log\(figures, step\)"):
        trained([logging.getLogger("any")])


def test_an_optimizer_without_a_rate_is_logged_without_one() -> None:
    class Own(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": None})

        def step(self, closure: Any = None) -> None: ...

    log, model = Anything(), nn.Linear(4, 3)
    step = TrainStep(model, Own(model.parameters()), supervised(nn.CrossEntropyLoss()))
    fit(step, batches((torch.randn(8, 4), torch.zeros(8, dtype=torch.long)), 8), epochs=1, loggers=[log])
    assert set(log.rows[0][0]) == {"batch_loss"}


def test_a_csv_file_that_is_deleted_meanwhile_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    log = CSVLog(path)
    for step in (1, 2, 3):
        log.log({"batch_loss": float(step)}, step)
        log.flush()
        if step == 1:
            path.unlink()
    assert text(path) == ["step,batch_loss", "2,2.0", "3,3.0"]
    path.unlink()
    log.log({"epoch": 1}, 3)
    assert text(path) == ["step,batch_loss,epoch", "3,,1"]


def test_names_of_any_characters_keep_their_cells(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    log = CSVLog(path)
    log.log({"a\u2028b": 1.0, "two\nlines": 2.0, "ä": 3.0}, 1)
    log.log({"c": 4.0}, 2)
    with path.open(newline="", encoding="utf-8") as file:
        first, second = csv.DictReader(file)
    assert first == {"step": "1", "a\u2028b": "1.0", "two\nlines": "2.0", "ä": "3.0", "c": ""}
    assert second["c"] == "4.0"


def test_a_csv_log_replaces_no_link_and_no_device(tmp_path: Path) -> None:
    path = tmp_path / "link.csv"
    path.symlink_to(tmp_path / "real.csv")
    log = CSVLog(path)
    log.log({"a": 1.0}, 1)
    log.log({"b": 2.0}, 2)
    assert path.is_symlink()
    assert text(tmp_path / "real.csv") == ["step,a,b", "1,1.0,", "2,,2.0"]
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="pipe is a device or a pipe; CSVLog writes a file"):
        CSVLog(tmp_path / "pipe")
    with pytest.raises(MachineError, match="cannot be written: File name too long"):
        CSVLog("a" * 300)


def test_a_failed_step_leaves_the_figures_of_those_before(tmp_path: Path) -> None:
    """They are read together, every 32 steps, and the last ones before an error are those of interest."""
    model = nn.Linear(4, 3)
    calls = []

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        calls.append(batch)
        if len(calls) == 4:
            raise RuntimeError("the fourth")
        return model(batch).square().mean()

    step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn)
    with pytest.raises(RuntimeError, match="the fourth"):
        fit(step, batches(torch.randn(40, 4), 8), epochs=1, loggers=[CSVLog(tmp_path / "log.csv")])
    assert [line.split(",")[0] for line in text(tmp_path / "log.csv")] == ["step", "1", "2", "3"]
