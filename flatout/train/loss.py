"""What a step minimises: `loss_fn(model, batch) -> loss`, the mean over the terms that the batch holds.

When a batch is split, the mean of the parts' means is the batch's mean only if each part has as many terms. Ragged
batches do not: a part with 10 valid targets must not weigh as much as one with 500. So a loss function may say how many
terms a batch has, by a method or attribute `count_terms(batch)`; without it samples are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from flatout.arguments import as_function, wrong
from flatout.data.nested import batch_length
from flatout.errors import UsageError
from flatout.train.global_metrics import as_metric, over_all

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

CountTerms: TypeAlias = Callable[[Any], "Tensor | float | None"]
"""Of how many terms the loss of a batch is the mean; None where it is their sum."""
Metrics: TypeAlias = "Callable[[Module, Any], Mapping[str, Any]]"
"""Figures of a batch by name, in the forms that `flatout.evaluate` takes."""


class LossFn(Protocol):
    """The loss of a batch: a scalar tensor, or (loss, figures) with further scalars by name, means as the loss is.

    A batch is whatever the data gives. Two further methods are optional: `CountsTerms` and `HasMetrics`.
    """

    def __call__(self, model: Module, batch: Any, /) -> Tensor | tuple[Tensor, Mapping[str, Any]]: ...


@runtime_checkable
class CountsTerms(Protocol):
    """A loss function that says of how many terms its mean is, such as the number of valid targets."""

    def count_terms(self, batch: Any, /) -> Tensor | float | None:
        """None where the loss is a sum."""
        ...


@runtime_checkable
class HasMetrics(Protocol):
    """A loss function that says what is to be measured when its model is evaluated."""

    def metrics(self, model: Module, batch: Any, /) -> Mapping[str, Any]:
        """Figures of a batch by name, in the forms that `flatout.evaluate` takes."""
        ...


def own_metrics(loss_fn: LossFn, count_terms: CountTerms, model: Any, batch: Any) -> Mapping[str, Any]:
    """The loss function's own metrics; where it has none, its loss and the figures beside it, weighted by the terms.

    Where a batch's samples cannot be counted, nor its terms, each batch weighs the same.
    """
    if isinstance(loss_fn, HasMetrics) and callable(loss_fn.metrics):
        return loss_fn.metrics(model, batch)
    from flatout.train.loss_parts import figures_of

    loss, figures = figures_of(loss_fn(model, batch))
    terms = terms_or_none(count_terms, batch)
    of_sum = (loss, 1) if terms is None else (loss * terms, terms)
    return {"loss": of_sum, **{name: _weighted(value, terms) for name, value in figures.items()}}


def terms_or_none(count_terms: CountTerms, batch: Any) -> Any:
    """How many terms the batch has; None for a loss that sums, and where nobody can say what a sample is."""
    if count_terms is not batch_length:
        return count_terms(batch)
    try:
        return batch_length(batch)
    except UsageError:
        return None


def _weighted(value: Any, terms: Any) -> Any:
    return (value, 1) if terms is None else (value * terms, terms)


class Supervised:
    """`loss_fn` for batches (inputs, targets): `criterion(model(inputs), targets)`.

    `inputs` may be a tuple (passed as positional arguments) or a dict (as keywords). Class scores may have the
    classes last, [..., classes], as language models give them; targets of class indices are then [...].
    """

    def __init__(self, criterion: Callable[..., Any], metrics: Mapping[str, Any] | None = None) -> None:
        self.criterion, self.over_all = criterion, dict(metrics or {})

    def __call__(self, model: Any, batch: Any) -> Any:
        outputs, targets = self.outputs(model, batch)
        _check_elementwise(self.criterion, outputs, targets)
        try:
            return self.criterion(outputs, targets)
        except (RuntimeError, ValueError, IndexError) as error:
            _explain_targets(self.criterion, outputs, targets, error)
            raise

    def outputs(self, model: Any, batch: Any) -> tuple[Any, Any]:
        """(scores, targets), flattened to [items, classes] and [items] where the classes stand last."""
        inputs, targets = pair(batch)
        if isinstance(inputs, dict):
            outputs = model(**inputs)
        else:
            outputs = model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)
        if not hasattr(outputs, "dim") or not hasattr(targets, "dim"):
            return outputs, targets
        indices = not targets.is_floating_point() and outputs.dim() == targets.dim() + 1
        if indices and outputs.shape[:-1] == targets.shape and outputs.dim() > 2:
            return outputs.flatten(0, -2), targets.flatten()
        return outputs, targets

    def count_terms(self, batch: Any) -> Any:
        """How many terms the criterion's mean has: the weight of the valid targets; None where it sums instead."""
        if getattr(self.criterion, "reduction", "mean") == "sum":
            pair(batch)
            return None
        return self._terms(batch)

    def _terms(self, batch: Any) -> Any:
        import torch

        targets = pair(batch)[1]
        if not isinstance(targets, torch.Tensor):
            return batch_length(batch)
        ignored = getattr(self.criterion, "ignore_index", None)
        class_weights = getattr(self.criterion, "weight", None)
        if targets.is_floating_point() or (ignored is None and class_weights is None):
            return targets.numel()
        valid = targets != ignored if ignored is not None else torch.ones_like(targets, dtype=torch.bool)
        if class_weights is not None:
            return (class_weights[targets.clamp(0, len(class_weights) - 1)] * valid).sum()
        return valid.sum()

    def metrics(self, model: Any, batch: Any) -> dict[str, Any]:
        """For `evaluate`: the loss of each valid target, for class indices whether the best class is right, and the
        metrics over all outputs."""
        import torch

        outputs, targets = self.outputs(model, batch)
        loss, terms = self.criterion(outputs, targets), self._terms(batch)
        found: dict[str, Any] = {"loss": (loss if self.count_terms(batch) is None else loss * terms, terms)}
        if isinstance(targets, torch.Tensor) and not targets.is_floating_point() and outputs.dim() == targets.dim() + 1:
            valid = targets != getattr(self.criterion, "ignore_index", -100)
            right = (outputs.argmax(1) == targets) & valid
            found["accuracy"] = (right.sum(), valid.sum())
            if self.over_all:
                outputs, targets = outputs.movedim(1, -1)[valid], targets[valid]
        return found | {name: over_all(metric, outputs, targets) for name, metric in self.over_all.items()}


def supervised(criterion: Callable[..., Any], *, metrics: Mapping[str, Any] | None = None) -> Supervised:
    """A loss function for batches that are (inputs, targets), such as `supervised(nn.CrossEntropyLoss())`.

    `metrics`: further ones over all outputs by name, which `evaluate` gives beside loss and accuracy. Each is a
    function of (outputs, targets) or an object of torchmetrics, as `flatout.over_all` takes them. Of class indices it
    gets the valid targets, [items], and their scores, [items, classes].

    Raises UsageError for what cannot be called so, and for reduction 'none': a step needs one number.
    """
    limit, remedy = "it is called as criterion(outputs, targets)", "for example torch.nn.CrossEntropyLoss()"
    as_function(criterion, "criterion", 2, limit=limit, remedy=remedy)
    if getattr(criterion, "reduction", "mean") == "none":
        raise UsageError(
            "the criterion's reduction is 'none'", limit="a step minimises one number", remedy="use 'mean' or 'sum'"
        )
    if not isinstance(metrics, Mapping | None):
        limit = "it maps names to functions of (outputs, targets) or metric objects"
        raise wrong("metrics", metrics, limit, 'for example {"f1": f1_score}')
    for metric in (metrics or {}).values():
        as_metric(metric)
    return Supervised(criterion, metrics)


_ELEMENTWISE = ("MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "BCELoss", "BCEWithLogitsLoss")


class LanguageModelLoss:
    """Cross-entropy of (tokens, targets), both [batch, tokens]; targets of -100 count as none.

    For models whose forward takes (tokens, targets=...) and returns the mean loss: `models.GPT2`,
    `models.TransformerLM`.
    """

    def __call__(self, model: Any, batch: Any) -> Any:
        tokens, targets = batch
        return model(tokens, targets=targets)

    def count_terms(self, batch: Any) -> Any:
        return (batch[1] != -100).sum()


def _check_elementwise(criterion: Any, outputs: Any, targets: Any) -> None:
    """[64, 1] against [64] broadcasts to [64, 64]: it trains, towards nonsense."""
    if type(criterion).__name__ not in _ELEMENTWISE or not hasattr(outputs, "shape") or not hasattr(targets, "shape"):
        return
    if outputs.shape != targets.shape:
        raise UsageError(
            f"the model gives {list(outputs.shape)} and the targets are {list(targets.shape)}",
            limit=f"{type(criterion).__name__} compares them element by element",
            remedy="give both one shape: squeeze the output or unsqueeze the targets",
        )


def _explain_targets(criterion: Any, outputs: Any, targets: Any, error: Exception) -> None:
    """Raise a UsageError that says what is wrong with class indices, where that is what is wrong."""
    if type(criterion).__name__ not in ("CrossEntropyLoss", "NLLLoss") or not hasattr(outputs, "shape"):
        return
    classes = outputs.shape[1] if outputs.dim() > 1 else 0
    shapes = f"the model gives {list(outputs.shape)} and the targets are {list(targets.shape)} {targets.dtype}"
    per_item = [*outputs.shape[:1], *outputs.shape[2:]]
    if list(targets.shape) == per_item and targets.is_floating_point():
        limit, remedy = "class indices are int64", "use targets.long()"
    elif list(targets.shape) not in (per_item, list(outputs.shape)):
        limit, remedy = f"there is one class index for each of {per_item}", "look at how the batch is put together"
    elif not targets.is_floating_point() and targets.numel() and not 0 <= int(targets.max()) < classes:
        shapes = f"a target is class {int(targets.max())}"
        limit, remedy = f"the model has {classes} classes, 0 to {classes - 1}", "give its last layer more outputs"
    else:
        return
    raise UsageError(shapes, limit=limit, remedy=remedy) from error


def pair(batch: Any) -> tuple[Any, Any]:
    """(inputs, targets) of a batch that is a pair; UsageError for any other."""
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    shape = f"{type(batch).__name__} of {len(batch)}" if hasattr(batch, "__len__") else type(batch).__name__
    raise UsageError(
        f"the batch is a {shape}",
        limit="supervised() takes batches that are (inputs, targets)",
        remedy="write your own loss_fn(model, batch) -> loss",
    )
