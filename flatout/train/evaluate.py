"""Evaluation: no gradients, the model's modes restored, sums on the device, one wait at the end.

    figures = evaluate(step, test)                        # a TrainStep: its model, precision, and its loss's metrics
    figures = evaluate(model, test, metrics)              # metrics(model, batch) -> dict
    figures["accuracy"]

A value of the dict is a tensor of one figure per item (all items of all batches are averaged); or a pair (sum over the
items, their number); or a scalar, the mean over its batch, weighted by the number of samples. So a smaller last batch
does not count too much. A metric that is not a mean is a `flatout.over_all(...)`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from flatout.arguments import as_iterable, as_metrics, as_model, as_plan, described, wrong
from flatout.data.batches import Batches, whole_epoch
from flatout.data.nested import batch_length, to_device
from flatout.data.stream import Stream
from flatout.errors import UsageError
from flatout.evaluation_mode import evaluating
from flatout.levers.model_call import calls_wrapped
from flatout.machine.ranks import ranks
from flatout.parallel.heartbeat import alive
from flatout.parallel.parallelize import let_go
from flatout.parallel.whole_tensors import across_of, home_of, ranks_of_calls
from flatout.plan import Plan
from flatout.precision.autocast import DTYPES, autocast_call
from flatout.precision.matmul import matmul_precision
from flatout.train.global_metrics import Gathered, OverAll
from flatout.train.loss import Metrics
from flatout.train.loss_parts import Number
from flatout.train.placement import explain_batch
from flatout.train.ranks import SameLengths, gathered, summed
from flatout.train.step import TrainStep

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    from flatout.parallel.tensor.training import SameBatch

_REMEDY = "for (inputs, targets): flatout.supervised(torch.nn.CrossEntropyLoss()).metrics"


def evaluate(
    step_or_model: TrainStep | Module,
    data: Iterable[object],
    metrics: Metrics | None = None,
    *,
    plan: Plan | None = None,
) -> dict[str, float]:
    """The figures of a model over all items of `data`, an iterable of batches.

    A TrainStep's model is evaluated in the precision of its plan, by its loss function's own metrics; without any, by
    its loss, each batch weighted by `count_terms`. With a model, `metrics` is required and the precision is that of
    `plan`. Return metrics that are not means over items with `flatout.over_all`.

    Batches are moved to the model's device. A figure over no item at all is NaN. A `flatout.batches(...)` is evaluated
    on a whole epoch, and stays at the epoch and the sample at which it is.

    Of several ranks each evaluates its share, if `data` is a `flatout.batches(...)`, and returns the figures of the
    whole data set; call it on all of them. Of any other data each rank returns the figures of its own.

    Raises UsageError if there is no batch, or if metrics returns anything but a dict of figures.
    """
    import torch

    model, metrics, plan = _subject(step_or_model, metrics, plan)
    remedy = "pass flatout.batches(data, 64, shuffle=False), or [batch]"
    as_iterable(data, "data", limit="it is an iterable of batches", remedy=remedy)
    totals = _Totals()
    shared = data.rank if isinstance(data, Batches | Stream) and data.ranks > 1 else None
    rest = data.too_few_for_ranks() if isinstance(data, Batches) and shared is not None else None
    home = _only_device(model)
    with contextlib.ExitStack() as around:
        let_go(model)  # its ranks are those of parameters that are not gathered now
        around.callback(let_go, model)
        others = ranks_of_calls(model) if shared is None else None
        lengths = None if others is None else SameLengths(others, next(model.parameters()).device)
        same_batch = _same_batch(model)
        around.enter_context(evaluating(model))
        around.enter_context(whole_epoch(data))
        # not inference_mode: tensors that a model creates lazily and keeps could not be used in training later
        around.enter_context(torch.no_grad())
        if plan.precision in DTYPES:
            around.enter_context(calls_wrapped(model, autocast_call(plan.precision)))
        if plan.matmul_precision is not None:
            around.enter_context(matmul_precision(plan.matmul_precision))
        for given in data:
            if lengths is not None:
                lengths.check(ended=False)
            batch = given if home is None else to_device(given, home)
            if same_batch is not None:
                same_batch.check(batch)
            totals.add(_measured(model, batch, metrics), batch)
            alive()
        if lengths is not None:
            lengths.check(ended=True)
        if shared is not None and isinstance(data, Stream):  # its end is known now
            rest = data.too_few_for_ranks()
        if rest is not None:  # every rank calls the model, because that may be a collective; one of them counts it
            batch = rest if home is None else to_device(rest, home)
            found = _measured(model, batch, metrics)
            if ranks().first:
                totals.add(found, batch)
    return totals.figures() if shared is None else totals.of_all_ranks(shared)


def _subject(
    step_or_model: TrainStep | Module, metrics: Metrics | None, plan: Plan | None
) -> tuple[Module, Metrics, Plan]:
    if isinstance(step_or_model, TrainStep):
        if plan is not None:
            limit = "a TrainStep has its own"
            raise UsageError("plan is given with a TrainStep", limit=limit, remedy="leave it out, or pass the model")
        step = step_or_model
        return step.model, step.metrics if metrics is None else as_metrics(metrics), step.plan
    model = as_model(step_or_model, "step_or_model")
    if metrics is None:
        limit = "a model alone does not say what to measure"
        raise wrong("metrics", None, limit, f"pass a TrainStep, or {_REMEDY}")
    return model, as_metrics(metrics), as_plan(plan, "step")


def _same_batch(model: Module) -> SameBatch | None:
    """Compares the first batch of ranks that share the model's layers; None where none do."""
    across = across_of(model)
    if across is None:
        return None
    from flatout.parallel.tensor.training import SameBatch

    return SameBatch(across)


class _Totals:
    """The figures so far: sums and numbers of items, and what is computed over all of them."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Number, Number]] = {}
        self._gathered: dict[str, Gathered] = {}
        self._empty = False
        """Was there a batch of which metrics returned no figure?"""

    def add(self, figures: Mapping[str, object], batch: object) -> None:
        self._empty = self._empty or not figures
        for name, value in figures.items():
            if isinstance(value, OverAll):
                if name not in self._gathered:
                    self._gathered[name] = Gathered(name, value.metric)
                self._gathered[name].add(value)
                continue
            total, count = _sum_and_count(name, value, batch)
            before = self._sums.get(name, (0.0, 0))
            self._sums[name] = before[0] + total, before[1] + count

    def of_all_ranks(self, share: int) -> dict[str, float]:
        """The figures over the batches of all ranks: a collective. Waits for the device.

        share: the number of this rank's share. Of ranks with the same one, the first counts.
        """
        from torch import distributed

        sums = {name: (float(total), float(count)) for name, (total, count) in self._sums.items()}
        rows = {name: one.rows() for name, one in self._gathered.items()}
        distributed.get_world_size()  # raises where there is no process group
        of_ranks = gathered((share, sums, rows), distributed.group.WORLD)
        of_shares = {number: (sums, rows) for number, sums, rows in reversed(of_ranks)}
        every = [of_shares[number] for number in sorted(of_shares)]
        self._sums = dict(summed(there for there, _ in every))
        for name, one in self._gathered.items():
            one.take([row for _, rows_there in every for row in rows_there.get(name, ())])
        return self.figures()

    def figures(self) -> dict[str, float]:
        """Waits for the device."""
        if not self._sums and not self._gathered:
            if self._empty:
                limit = "it returns a dict with a name for each figure"
                raise UsageError("metrics returned an empty dict", limit=limit, remedy=_REMEDY)
            raise UsageError("there is no batch to evaluate", limit="at least one batch is needed")
        negative = next((name for name, (_, count) in self._sums.items() if float(count) < 0), None)
        if negative is not None:
            raise UsageError(
                f"the figure {negative!r} is of {float(self._sums[negative][1]):g} items",
                limit="a pair is (sum over the items, their number)",
                remedy="return a number of at least 0",
            )
        means = {
            name: float(total) / float(count) if float(count) else float("nan")
            for name, (total, count) in self._sums.items()
        }
        for one in self._gathered.values():
            found = one.figures()
            if double := sorted(found.keys() & means.keys()):
                raise UsageError(
                    f"two figures are named {double[0]!r}",
                    limit=f"one is of {one.name!r}, computed over all items",
                    remedy="give one of them another name",
                )
            means |= found
        return means


def _measured(model: Module, batch: object, metrics: Metrics) -> Mapping[str, object]:
    try:
        figures = metrics(model, batch)
    except (RuntimeError, TypeError) as error:
        explain_batch(model, batch, error)
        raise
    if not isinstance(figures, Mapping):
        raise UsageError(
            f"metrics returned {described(figures)}",
            limit="it returns a dict: a name for each figure, with a tensor of one figure per item",
            remedy=_REMEDY,
        )
    return figures


def _sum_and_count(name: str, value: object, batch: object) -> tuple[Number, Number]:
    import torch

    if isinstance(value, tuple) and len(value) == 2:
        total, count = (_one(name, part) for part in value)
        if isinstance(count, torch.Tensor):  # a sum over no items counts as 0, even if it is NaN
            return torch.where(count == 0, torch.zeros_like(count), total), count
        return (total if count else 0.0), count
    try:
        values = torch.as_tensor(value).detach()
        if values.is_complex():
            raise TypeError("complex numbers have no mean that could be compared")
        values = values.double()
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"metrics returned {described(value)} as the figure {name!r}",
            limit="a figure is a tensor of one value per item, a pair (sum, number of items), or a mean over the batch",
        ) from error
    if values.dim() > 0:
        return values.sum(), values.numel()
    try:
        samples = batch_length(batch)
    except UsageError as error:
        raise UsageError(
            f"metrics returned one value as the figure {name!r}",
            limit=f"such a mean is weighted by the number of samples, and {error.what}",
            remedy="return a pair: (sum over the items, their number)",
        ) from error
    return values.sum() * samples, samples


def _one(name: str, value: object) -> Number:
    """A sum or a number of items; tensors in double, as many batches are added up."""
    import torch

    if not isinstance(value, torch.Tensor):
        return value  # type: ignore[return-value]  # what adds up like a number is one
    if value.numel() != 1:
        raise UsageError(
            f"metrics returned a pair with a tensor of shape {list(value.shape)} as the figure {name!r}",
            limit="a pair is (sum over the items, number of items), two numbers",
            remedy="add the items up, or return the tensor alone",
        )
    return value.detach().squeeze().double()


def _only_device(model: Module) -> torch.device | None:
    """The model's device; None if it has no parameters, or several devices."""
    devices = {home_of(parameter) for parameter in model.parameters()}
    return devices.pop() if len(devices) == 1 else None
