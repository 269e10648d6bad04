"""Where `fit` writes its figures: a CSV file, TensorBoard, or any object with `log(figures, step)`.

A logger may also have `flush()`, called however `fit` ends, and `state_dict()` and `load_state_dict(state)`: its state
is then saved and restored with the run, so that a log that was written past the last checkpoint can drop what follows
it. Without them the rows of steps that are trained again appear twice.
"""

from __future__ import annotations

import contextlib
import csv
import io
import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Protocol, TypedDict, runtime_checkable

from flatout.arguments import as_function, as_path, as_whole_number
from flatout.checkpoint.capturing import Stateful
from flatout.errors import MachineError, UsageError
from flatout.whole_files import written_whole

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

ROWS_HELD = 64
"""Rows of steps that are written together."""


@runtime_checkable
class Logger(Protocol):
    """What `fit(loggers=...)` takes; a run of wandb is one."""

    def log(self, figures: dict[str, float], step: int, /) -> object: ...


class CSVLogState(TypedDict):
    """How many rows there are, and their columns."""

    rows: int
    columns: list[str]


class TensorBoardLogState(TypedDict):
    """The last step that was logged, and its figures."""

    step: int
    rows: list[dict[str, float]]


class CSVLog:
    """Figures as the rows of a CSV file: `step`, then a column for each name; cells without a figure are empty.

    With `every` = n only every n-th step gets a row; epochs always do. A run that starts over starts a new file, and
    keeps the previous one as NAME.old. Rows are flushed to disk when a checkpoint is made.
    """

    def __init__(self, path: str | os.PathLike[str], *, every: int = 1) -> None:
        self.place, self._every = as_path(path, "path"), as_whole_number(every, "every")
        with self._explaining_errors():
            if self.place.is_dir():
                raise UsageError(f"{self.place} is a folder", limit="CSVLog writes a file", remedy="name a file in it")
            if self.place.exists() and not self.place.is_file():  # /dev/null would become a file
                limit, remedy = "CSVLog writes a file, and reads it again", "name a file, or leave this log out"
                raise UsageError(f"{self.place} is a device or a pipe", limit=limit, remedy=remedy)
        self._columns: list[str] = ["step"]
        self._rows = 0
        self._unwritten: list[list[object]] = []

    def log(self, figures: Mapping[str, float], step: int) -> None:
        if _is_of_a_step(figures) and step % self._every:
            return
        if new := [name for name in figures if name not in self._columns]:
            self.flush()
            self._columns += new
            self._write(self._read() if self._rows else [])
        row = {**figures, "step": step}
        self._unwritten.append([row.get(name, "") for name in self._columns])
        self._rows += 1
        if not _is_of_a_step(figures) or len(self._unwritten) >= ROWS_HELD:
            self.flush()

    def flush(self) -> None:
        """Write the rows in memory. MachineError where that fails; they are not tried again."""
        rows, self._unwritten = self._unwritten, []
        if not rows:
            return
        if not self.place.exists():  # deleted meanwhile: the rows still need a line with their columns
            self._write([])
        with self._explaining_errors(), _opened(self.place, "a") as file:
            csv.writer(file).writerows(rows)
            file.flush()
            os.fsync(file.fileno())

    @contextlib.contextmanager
    def _explaining_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise MachineError(
                f"{self.place} cannot be written: {error.strerror}",
                limit="it holds the figures of the run",
                remedy="make room, name another file, or leave this log out",
            ) from error

    def state_dict(self) -> CSVLogState:
        """How many rows there are; they are flushed to disk."""
        self.flush()
        return {"rows": self._rows, "columns": list(self._columns)}

    def load_state_dict(self, state: CSVLogState) -> None:
        """Drop the rows that were written since."""
        self._unwritten = []
        self._columns, self._rows = list(state["columns"]), state["rows"]
        if not self._rows:
            return
        found = self._read()
        if len(found) < self._rows:
            warnings.warn(f"{self.place} has {len(found)} of the {self._rows} rows that were logged", stacklevel=2)
        self._rows = min(self._rows, len(found))
        self._write(found[: self._rows])

    def _read(self) -> list[dict[str, str]]:
        """The complete rows; one that a kill cut short has no end of line. None where the file was deleted."""
        with self._explaining_errors():
            if not self.place.exists():
                return []
            with _opened(self.place) as file:
                text = file.read()
        # not splitlines(), which also splits at characters that are no end of a row, and within quoted names
        return list(csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1], newline="")))

    def _write(self, rows: Sequence[Mapping[str, str]]) -> None:
        """The file with these rows and all columns, whole or not at all."""
        with self._explaining_errors():
            place = Path(os.path.realpath(self.place))  # a link stays one
            place.parent.mkdir(parents=True, exist_ok=True)
            if not rows and place.is_file():
                place.replace(place.with_name(place.name + ".old"))
            with written_whole(place) as temporary, _opened(temporary, "w") as file:
                writer = csv.writer(file)
                writer.writerow(self._columns)
                writer.writerows([row.get(name, "") for name in self._columns] for row in rows)


class TensorBoardLog:
    """Figures as TensorBoard scalars, in a folder; `every` as in CSVLog. Needs the package tensorboard.

    After a resume TensorBoard hides what was written past the checkpoint. Raises MachineError without the package.
    """

    def __init__(self, folder: str | os.PathLike[str], *, every: int = 1) -> None:
        self.place, self._every = as_path(folder, "folder"), as_whole_number(every, "every")
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MachineError(
                "the package tensorboard is not installed",
                limit="TensorBoardLog writes with it",
                remedy="pip install tensorboard",
            ) from error
        self._make = SummaryWriter
        self._writer: SummaryWriter | None = None
        self._latest: tuple[int, list[dict[str, float]]] = (-1, [])
        """The last step that was logged, and its figures: TensorBoard can only drop whole steps."""

    def log(self, figures: Mapping[str, float], step: int) -> None:
        if _is_of_a_step(figures) and step % self._every:
            return
        before = self._latest[1] if self._latest[0] == step else []
        self._latest = step, [*before, dict(figures)]
        self._add(figures, step)

    def _add(self, figures: Mapping[str, float], step: int) -> None:
        if self._writer is None:
            self._writer = self._make(str(self.place))
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def state_dict(self) -> TensorBoardLogState:
        self.flush()
        step, rows = self._latest
        return {"step": step, "rows": rows}

    def load_state_dict(self, state: TensorBoardLogState) -> None:
        self.close()
        self._latest = state["step"], [dict(row) for row in state["rows"]]
        self._writer = self._make(str(self.place), purge_step=max(state["step"], 0))
        for row in self._latest[1]:
            self._add(row, state["step"])

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def check_loggers(loggers: object) -> tuple[Logger, ...]:
    if isinstance(loggers, Logger) and not isinstance(loggers, type):
        raise UsageError("loggers is a single logger", limit="it is a list of them", remedy="pass loggers=[logger]")
    if not isinstance(loggers, list | tuple):
        raise UsageError(f"loggers is {loggers!r}", limit="it is a list of objects with log(figures, step)")
    for one in loggers:
        if isinstance(one, type | logging.Logger | logging.LoggerAdapter) or not isinstance(one, Logger):
            raise UsageError(
                f"a logger is {one!r}",
                limit="it has log(figures, step)",
                remedy="for example flatout.CSVLog('run/log.csv')",
            )
        as_function(one.log, f"the log of a {type(one).__name__}", 2, limit="it is called as log(figures, step)")
    return tuple(loggers)


class RunLoggers:
    """The loggers of a run.

    One that raises gets no more figures. What it raised is kept in `failures`: the run ends with it once everything was
    saved, as a log must not cost the training that it describes.
    """

    def __init__(self, loggers: Sequence[Logger]) -> None:
        self._loggers = tuple(loggers)
        self.failures: dict[int, Exception] = {}
        """By the place of a logger, what it raised first."""

    def __bool__(self) -> bool:
        return bool(self._loggers)

    def log(self, figures: Mapping[str, float], step: int) -> None:
        for place, one in enumerate(self._loggers):
            if place not in self.failures:
                with self._noting_failure(place):
                    one.log(dict(figures), step)

    def flush(self) -> None:
        for place, one in enumerate(self._loggers):
            if callable(written := getattr(one, "flush", None)):
                with self._noting_failure(place):
                    written()

    def state_dict(self) -> dict[str, object]:
        states = {}
        for name, (place, one) in self._named().items():
            with self._noting_failure(place):
                states[name] = one.state_dict()
        return states

    def load_state_dict(self, states: Mapping[str, object]) -> None:
        """Restore the loggers that the run had; a new one starts empty."""
        for name, (_, one) in self._named().items():
            if (state := states.get(name)) is not None:
                one.load_state_dict(state)

    @contextlib.contextmanager
    def _noting_failure(self, place: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.failures.setdefault(place, error)

    def _named(self) -> dict[str, tuple[int, Stateful]]:
        """Those with a state, and their places: 'CSVLog log.csv', by type and file, or by type and number. Not by the
        whole path: a run may be moved, with its log."""
        numbered: dict[str, tuple[int, Stateful]] = {}
        for place, one in enumerate(self._loggers):
            if isinstance(one, Stateful):
                kind = type(one).__name__
                numbered[f"{kind} {sum(name.startswith(f'{kind} ') for name in numbered)}"] = place, one
        files = {
            name: f"{type(one).__name__} {_file_name(one)}" for name, (_, one) in numbered.items() if _file_name(one)
        }
        alone = {name: file for name, file in files.items() if list(files.values()).count(file) == 1}
        return {alone.get(name, name): entry for name, entry in numbered.items()}


def _file_name(logger: object) -> str:
    """Of the file or folder that it writes; '' of a logger of another kind."""
    return logger.place.name if isinstance(logger, CSVLog | TensorBoardLog) else ""


def _is_of_a_step(figures: Mapping[str, float]) -> bool:
    return "batch_loss" in figures and "epoch" not in figures


def _opened(place: Path, mode: str = "r") -> IO[str]:
    """As a CSV file: ends of lines as they are, and any bytes that another program has left there."""
    return open(place, mode, newline="", encoding="utf-8", errors="surrogateescape")
