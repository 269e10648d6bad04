"""Evaluation: no gradients, the model's modes put back, sums on the device, one wait at the end.

    figures = evaluate(model, batches, supervised(nn.CrossEntropyLoss()).measure)
    figures["accuracy"]

`measure(model, batch)` returns a dict. A value is a tensor of one figure per item (all items of all batches are
averaged), or a pair (sum over the items, their number): so a last batch with fewer items does not count too much.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from flatout.errors import UsageError
from flatout.levers.model_call import calls_wrapped
from flatout.plan import Plan
from flatout.precision.autocast import DTYPES, autocast_call

Measure = Callable[[Any, Any], Mapping[str, Any]]


def evaluate(model: Any, batches: Iterable[Any], measure: Measure, plan: Plan | None = None) -> dict[str, float]:
    """The mean of each figure over all items of `batches`. Precision as the plan says.

    Raises UsageError where there is no batch, or `measure` returns no dict.
    """
    import torch

    precision = plan.precision if plan is not None else None
    sums: dict[str, list[Any]] = {}
    with contextlib.ExitStack() as around:
        around.enter_context(evaluating(model))
        around.enter_context(torch.inference_mode())
        if precision in DTYPES:
            around.enter_context(calls_wrapped(model, autocast_call(precision)))
        for batch in batches:
            figures = measure(model, batch)
            _check(figures)
            for name, value in figures.items():
                total, count = value if isinstance(value, tuple) else (value.double().sum(), value.numel())
                held = sums.setdefault(name, [0.0, 0])
                held[0], held[1] = held[0] + total, held[1] + count
    if not sums:
        raise UsageError("there was nothing to evaluate on", limit="at least one batch is needed")
    return {
        name: float(total) / float(count) if float(count) else float("nan") for name, (total, count) in sums.items()
    }


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


def _mean(total: float, count: float) -> float:
    return total / count if count else float("nan")


def _check(figures: Any) -> None:
    if not isinstance(figures, Mapping):
        raise UsageError(
            f"measure returned {type(figures).__name__}",
            limit="it returns a dict: a name for each figure, with a tensor of one figure per item",
        )
