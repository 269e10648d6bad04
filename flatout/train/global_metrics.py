"""Metrics that are no means over items (F1, AUC, correlation): computed once, over the outputs of all batches.

f1 = torchmetrics.F1Score(task="multiclass", num_classes=10)

def metrics(model, batch):
    inputs, targets = batch
    scores = model(inputs)
    return {
        "f1": flatout.over_all(f1, scores, targets),                        # update(...), compute() in the end
        "auc": flatout.over_all(roc_auc_score, targets, scores[:, 1]),      # any function of all the rows
    }
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from flatout.arguments import described, wrong
from flatout.errors import UsageError


@runtime_checkable
class Metric(Protocol):
    """An object that takes what it needs of each batch, as torchmetrics has them. `reset()` is called first, if any."""

    def update(self, *rows: Any) -> object: ...

    def compute(self) -> Any: ...


@dataclass(frozen=True)
class OverAll:
    """What one batch adds to a metric over all of them."""

    metric: Metric | Callable[..., Any]
    rows: tuple[Any, ...]


def over_all(metric: Metric | Callable[..., Any], *rows: Any) -> OverAll:
    """A figure of all batches together, as a value in the dict that `metrics(model, batch)` returns.

    `rows` are this batch's part: tensors [items, ...] that agree but for their first size, or lists. A function is
    called once with those of all batches, one after the other: tensors on the CPU, 16-bit floats as fp32. An object
    with update() and compute(), such as one of torchmetrics, is reset, updated with each batch's rows as they are, and
    asked in the end. Either gives one number, or a dict of numbers, whose names are then joined to the figure's.

    Without a single row in all batches a function is not called, and its figure is NaN. NaN among the rows is the
    metric's own affair.
    """
    return OverAll(as_metric(metric), rows)


def as_metric(value: Any) -> Any:
    """UsageError for what is neither a function nor a metric object."""
    if isinstance(value, Metric) and not isinstance(value, type):
        return value
    if callable(value) and not isinstance(value, type):
        return value
    limit = "it is a function of all rows, or an object with update() and compute()"
    raise wrong("metric", value, limit, "for example flatout.over_all(roc_auc_score, targets, scores)")


class Gathered:
    """One such figure while batches come."""

    def __init__(self, name: str, metric: Metric | Callable[..., Any]) -> None:
        self.name, self.metric = name, metric
        self._rows: list[tuple[Any, ...]] = []
        reset = getattr(metric, "reset", None)
        if isinstance(metric, Metric) and callable(reset):
            reset()

    def add(self, given: OverAll) -> None:
        if given.metric is not self.metric and isinstance(self.metric, Metric):
            raise UsageError(
                f"the metric of the figure {self.name!r} is another one in each batch",
                limit="an object that is updated by all batches is one",
                remedy="make it once, outside of the function that measures a batch",
            )
        if isinstance(self.metric, Metric):
            self.metric.update(*given.rows)
        else:
            self._rows.append(tuple(map(_held, given.rows)))

    def figures(self) -> dict[str, float]:
        """The figure by its name, or several."""
        try:
            found = self._computed()
        except UsageError:
            raise
        except Exception as error:
            error.add_note(f"while the figure {self.name!r} was computed over all batches")
            raise
        if isinstance(found, Mapping):
            return {f"{self.name}_{key}": self._number(value) for key, value in found.items()}
        return {self.name: self._number(found)}

    def _computed(self) -> Any:
        if isinstance(self.metric, Metric):
            return self.metric.compute()
        columns = [_joined(self.name, column) for column in zip(*self._rows, strict=True)]
        return self.metric(*columns) if any(len(column) for column in columns) else float("nan")

    def _number(self, value: Any) -> float:
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            shape = f" of shape {list(value.shape)}" if hasattr(value, "shape") else ""
            raise UsageError(
                f"the metric of the figure {self.name!r} gave {described(value)}{shape}",
                limit="it gives one number, or a dict of numbers",
                remedy="average over the classes, or return a dict with a name for each",
            ) from error


def _held(rows: Any) -> Any:
    import torch

    return rows.detach() if isinstance(rows, torch.Tensor) else rows


def _joined(name: str, parts: Sequence[Any]) -> Any:
    """The rows of all batches in one."""
    import torch

    if all(isinstance(part, torch.Tensor) for part in parts):
        try:
            whole = torch.cat([part if part.dim() else part.reshape(1) for part in parts]).cpu()
        except RuntimeError as error:
            shapes = ", ".join(sorted({str(list(part.shape[1:])) for part in parts}))
            raise UsageError(
                f"the rows of the figure {name!r} are {shapes}",
                limit="rows of all batches are put into one tensor: they have one shape",
                remedy="pad or flatten them, or give an object with update() and compute()",
            ) from error
        return whole.float() if whole.dtype in (torch.float16, torch.bfloat16) else whole
    if all(isinstance(part, list | tuple) for part in parts):
        return [row for part in parts for row in part]
    raise UsageError(
        f"over_all was given {described(parts[0])} for the figure {name!r}",
        limit="rows are tensors [items, ...] or lists",
        remedy="convert arrays: torch.as_tensor(array)",
    )
