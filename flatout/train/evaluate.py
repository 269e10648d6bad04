"""Evaluation: no gradients, the model's modes put back, sums on the device, one wait at the end.

    figures = evaluate(model, batches, supervised(nn.CrossEntropyLoss()).measure)
    figures["accuracy"]

`measure(model, batch)` returns a dict. A value is a tensor of one figure per item (all items of all batches are
averaged); or a pair (sum over the items, their number); or a scalar, the mean over its batch, which counts as often as
the batch has samples. So a last batch with fewer items does not count too much.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from flatout.arguments import as_iterable, as_measure, as_model, as_plan, described
from flatout.data.nested import batch_length, to_device
from flatout.errors import UsageError
from flatout.levers.model_call import calls_wrapped
from flatout.plan import Plan
from flatout.precision.autocast import DTYPES, autocast_call
from flatout.train.placement import explain_batch

Measure = Callable[[Any, Any], Mapping[str, Any]]
_REMEDY = "for (inputs, targets): flatout.supervised(torch.nn.CrossEntropyLoss()).measure"


def evaluate(model: Any, batches: Iterable[Any], measure: Measure, plan: Plan | None = None) -> dict[str, float]:
    """The mean of each figure over all items of `batches`, in the precision of the plan.

    Batches that lie elsewhere are brought to the model's device. Raises UsageError where there is no batch, or measure
    returns something else than a dict of figures.
    """
    import torch

    precision = as_plan(plan, "step").precision
    as_model(model)
    remedy = "pass flatout.batches(data, 64, shuffle=False), or [batch]"
    as_iterable(batches, "batches", limit="it is an iterable of batches", remedy=remedy)
    as_measure(measure)
    sums: dict[str, tuple[Any, Any]] = {}
    home = _only_device(model)
    with contextlib.ExitStack() as around:
        around.enter_context(evaluating(model))
        # not inference_mode: what a model makes when it is first needed, and keeps, could not be trained with later
        around.enter_context(torch.no_grad())
        if precision in DTYPES:
            around.enter_context(calls_wrapped(model, autocast_call(precision)))
        for given in batches:
            batch = given if home is None else to_device(given, home)
            for name, (total, count) in _measured(model, batch, measure).items():
                before = sums.get(name, (0.0, 0))
                sums[name] = before[0] + total, before[1] + count
    if not sums:
        raise UsageError("there was nothing to evaluate on", limit="at least one batch is needed")
    return {
        name: float(total) / float(count) if float(count) else float("nan") for name, (total, count) in sums.items()
    }


def _measured(model: Any, batch: Any, measure: Measure) -> dict[str, tuple[Any, Any]]:
    """Figure -> (sum over the items, their number) of one batch."""
    try:
        figures = measure(model, batch)
    except (RuntimeError, TypeError) as error:
        explain_batch(model, batch, error)
        raise
    if not isinstance(figures, Mapping):
        raise UsageError(
            f"measure returned {described(figures)}",
            limit="it returns a dict: a name for each figure, with a tensor of one figure per item",
            remedy=_REMEDY,
        )
    return {name: _sum_and_count(name, value, batch) for name, value in figures.items()}


def _sum_and_count(name: str, value: Any, batch: Any) -> tuple[Any, Any]:
    import torch

    if isinstance(value, tuple) and len(value) == 2:
        total, count = value
        if isinstance(count, torch.Tensor):  # the sum over nothing counts as nothing, even where it is NaN
            return torch.where(count == 0, torch.zeros_like(count), total), count
        return (total if count else 0.0), count
    try:
        values = torch.as_tensor(value).detach().double()
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"measure returned {described(value)} as the figure {name!r}",
            limit="a figure is a tensor of one value per item, a pair (sum, number of items), or a mean over the batch",
        ) from error
    if values.numel() != 1:
        return values.sum(), values.numel()
    try:
        samples = batch_length(batch)
    except UsageError as error:
        raise UsageError(
            f"measure returned one value as the figure {name!r}",
            limit=f"such a mean counts as often as its batch has samples, and {error.what}",
            remedy="return a pair: (sum over the items, their number)",
        ) from error
    return values.sum() * samples, samples


def _only_device(model: Any) -> Any:
    """Where the model is; None where it is nowhere, or in several places."""
    devices = {parameter.device for parameter in model.parameters()}
    return devices.pop() if len(devices) == 1 else None


@contextlib.contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Evaluation mode for every module; afterwards each has the mode that it had (a frozen batch norm stays frozen)."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
