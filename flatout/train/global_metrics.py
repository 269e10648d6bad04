"""Metrics that are not means over items (F1, AUC, correlation): computed once, over the outputs of all batches.

f1 = torchmetrics.F1Score(task="multiclass", num_classes=10)

def metrics(model, batch):
    inputs, targets = batch
    scores = model(inputs)
    return {
        "f1": flatout.over_all(f1, scores, targets),                        # update(...), compute() at the end
        "auc": flatout.over_all(roc_auc_score, targets, scores[:, 1]),      # any function of all the rows
    }
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Protocol, SupportsFloat, TypeAlias, TypeVar, runtime_checkable

from flatout.arguments import described, wrong
from flatout.errors import UsageError

Score: TypeAlias = SupportsFloat | Mapping[str, SupportsFloat]
"""What a metric returns: one number (a scalar tensor too), or several by name."""
T = TypeVar("T")


@runtime_checkable
class Metric(Protocol):
    """An object that is updated with each batch, such as those of torchmetrics. `reset()` is called first, if any."""

    @property
    def update(self) -> Callable[..., object]:
        """A method; it takes a batch's rows."""
        ...

    def compute(self) -> Score: ...


MetricLike: TypeAlias = Metric | Callable[..., Score]


@dataclass(frozen=True)
class OverAll:
    """What one batch adds to a metric over all batches."""

    metric: MetricLike
    rows: tuple[object, ...]


def over_all(metric: Metric | Callable[..., Score], *rows: object) -> OverAll:
    """A figure of all batches together, as a value in the dict that `metrics(model, batch)` returns.

    `rows` are this batch's part: tensors [items, ...] with the same shape but for the first size, or lists. A function
    is called once with the rows of all batches, concatenated: tensors on the CPU, 16-bit floats as fp32. An object
    with update() and compute(), such as one of torchmetrics, is reset, updated with each batch's rows as they are, and
    computed at the end. Either returns one number, or a dict of numbers, whose names are appended to the figure's.

    If there is no row in any batch, a function is not called, and its figure is NaN. NaN among the rows is passed on
    to the metric.
    """
    return OverAll(as_metric(metric), rows)


def as_metric(value: T) -> T:
    """UsageError for anything but a function or a metric object."""
    if (isinstance(value, Metric) or callable(value)) and not isinstance(value, type):
        return value
    limit = "it is a function of all rows, or an object with update() and compute()"
    raise wrong("metric", value, limit, "for example flatout.over_all(roc_auc_score, targets, scores)")


class Gathered:
    """One such figure, batch by batch."""

    def __init__(self, name: str, metric: MetricLike) -> None:
        self.name, self.metric = name, metric
        self._rows: list[tuple[object, ...]] = []
        reset = getattr(metric, "reset", None)
        if isinstance(metric, Metric) and callable(reset):
            reset()

    def add(self, given: OverAll) -> None:
        if given.metric is not self.metric and isinstance(self.metric, Metric):
            raise UsageError(
                f"the metric of the figure {self.name!r} is a different object in each batch",
                limit="all batches have to update the same object",
                remedy="create it once, outside of the metrics function",
            )
        if isinstance(self.metric, Metric):
            self.metric.update(*given.rows)
        else:
            self._rows.append(tuple(map(_held, given.rows)))

    def rows(self) -> list[tuple[object, ...]]:
        """The rows so far, on the host, for the other ranks. None of an object that exchanges its state by itself, as
        those of torchmetrics do."""
        if isinstance(self.metric, Metric):
            if not callable(getattr(self.metric, "sync", None)):
                raise UsageError(
                    f"the metric of the figure {self.name!r} is a {type(self.metric).__name__}",
                    limit="it keeps a state of its own, which ranks that share the data cannot exchange",
                    remedy="pass a function of all rows, or let each rank evaluate all: batches(..., rank=0, ranks=1)",
                )
            return []
        return [tuple(one.cpu() if hasattr(one, "cpu") else one for one in row) for row in self._rows]

    def take(self, rows: list[tuple[object, ...]]) -> None:
        """The rows of all ranks."""
        self._rows = rows

    def figures(self) -> dict[str, float]:
        """The figure by its name, or several figures."""
        try:
            found = self._computed()
        except UsageError:
            raise
        except Exception as error:
            error.add_note(f"while computing the figure {self.name!r} over all batches")
            raise
        if isinstance(found, Mapping):
            return {f"{self.name}_{key}": self._number(value) for key, value in found.items()}
        return {self.name: self._number(found)}

    def _computed(self) -> Score:
        if isinstance(self.metric, Metric):
            return self.metric.compute()
        columns = [_joined(self.name, column) for column in zip(*self._rows, strict=True)]
        return self.metric(*columns) if any(len(column) for column in columns) else float("nan")

    def _number(self, value: SupportsFloat) -> float:
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            shape = f" of shape {list(value.shape)}" if hasattr(value, "shape") else ""
            raise UsageError(
                f"the metric of the figure {self.name!r} returned {described(value)}{shape}",
                limit="it returns one number, or a dict of numbers",
                remedy="average over the classes, or return a dict with a name for each",
            ) from error


def _held(rows: object) -> object:
    import torch

    return rows.detach() if isinstance(rows, torch.Tensor) else rows


def _joined(name: str, parts: Sequence[object]) -> Sized:
    """The rows of all batches in one."""
    import torch

    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    if len(tensors) == len(parts):
        try:
            whole = torch.cat([part if part.dim() else part.reshape(1) for part in tensors]).cpu()
        except RuntimeError as error:
            shapes = ", ".join(sorted({str(list(part.shape[1:])) for part in tensors}))
            raise UsageError(
                f"the rows of the figure {name!r} are {shapes}",
                limit="rows of all batches are concatenated: their shapes agree but for the first size",
                remedy="pad or flatten them, or pass an object with update() and compute()",
            ) from error
        return whole.float() if whole.dtype in (torch.float16, torch.bfloat16) else whole
    lists = [part for part in parts if isinstance(part, list | tuple)]
    if len(lists) == len(parts):
        return [row for part in lists for row in part]
    raise UsageError(
        f"over_all was given {described(parts[0])} for the figure {name!r}",
        limit="rows are tensors [items, ...] or lists",
        remedy="convert arrays: torch.as_tensor(array)",
    )
