"""What a step minimises: `loss_fn(model, batch) -> loss`, the mean over the batch's terms.

When a batch is split, the mean of the parts' means is the batch's mean only if all parts have the same number of terms.
Parts of ragged batches do not: one with 10 valid targets must not weigh as much as one with 500. So a loss function may
say how many terms a batch has, with a method or attribute `count_terms(batch)`; without it samples are counted.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, SupportsFloat, TypeAlias, TypeGuard  # Any: batches and outputs are the user's

from flatout.arguments import as_function, described, wrong
from flatout.data.nested import batch_length, is_numpy_array
from flatout.errors import UsageError
from flatout.train.global_metrics import MetricLike, as_metric, over_all
from flatout.train.loss_parts import figures_of

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

# Untyped arguments in these three: the user's functions name the types of their own models and batches.
CountTerms: TypeAlias = "Callable[[Any], Tensor | float | None]"
"""The number of terms that the loss of a batch is the mean of; None if it is their sum."""
Metrics: TypeAlias = "Callable[[Any, Any], Mapping[str, object]]"
"""metrics(model, batch): figures by name, in the forms that `flatout.evaluate` takes."""
LossFn: TypeAlias = "Callable[[Any, Any], Tensor | tuple[Tensor, Mapping[str, Tensor | float]]]"
"""loss_fn(model, batch): a scalar tensor, or (loss, figures) with further scalars by name, means like the loss.

A batch is whatever the data yields. Two methods are optional: `count_terms`, a CountTerms, and `metrics`, a Metrics.
"""


def own_metrics(loss_fn: LossFn, count_terms: CountTerms, model: Module, batch: object) -> Mapping[str, object]:
    """The loss function's own metrics; without any, its loss and further figures, weighted by the terms.

    If neither samples nor terms can be counted, each batch has the same weight.
    """
    metrics: Metrics | None = getattr(loss_fn, "metrics", None)
    if callable(metrics):
        return metrics(model, batch)
    loss, figures = figures_of(loss_fn(model, batch))
    terms = terms_or_none(count_terms, batch)
    return {name: _weighted(value, terms) for name, value in {"loss": loss, **figures}.items()}


def terms_or_none(count_terms: CountTerms, batch: object) -> Tensor | float | None:
    """How many terms the batch has; None for a loss that sums, and for a batch whose samples cannot be counted."""
    if count_terms is not batch_length:
        return as_terms(count_terms(batch))
    try:
        return batch_length(batch)
    except UsageError:
        return None


def as_terms(value: object) -> Tensor | float | None:
    """What `count_terms` returned. UsageError for anything but a number from 0, and None."""
    import torch

    if value is None or (isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex()):
        return value
    number = float(value) if isinstance(value, SupportsFloat) and not isinstance(value, torch.Tensor) else math.nan
    if not 0 <= number < math.inf:
        shape = f" of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else ""
        raise UsageError(
            f"count_terms returned {described(value)}{shape}",
            limit="it returns how many terms the loss of the batch is the mean of, or None for a sum",
            remedy="for example lambda batch: (batch[1] != -100).sum()",
        )
    return number


def _weighted(value: Tensor | float, terms: Tensor | float | None) -> tuple[Tensor | float, Tensor | float]:
    if terms is None:
        return value, 1
    return (float(value) if isinstance(value, int | float) else value.double()) * terms, terms


class Supervised:
    """`loss_fn` for batches (inputs, targets): `criterion(model(inputs), targets)`.

    `inputs` may be a tuple (passed as positional arguments) or a dict (as keywords). Class scores may have the
    classes last, [..., classes], as language models return them; targets of class indices are then [...].
    """

    def __init__(self, criterion: Callable[..., Tensor], metrics: Mapping[str, MetricLike] | None = None) -> None:
        self.criterion, self.over_all = criterion, dict(metrics or {})

    def __call__(self, model: Module, batch: object) -> Tensor:
        return self._loss(*self.outputs(model, batch))

    def _loss(self, outputs: object, targets: object) -> Tensor:
        _check_elementwise(self.criterion, outputs, targets)
        try:
            return self.criterion(outputs, targets)
        except (RuntimeError, ValueError, IndexError, TypeError, AttributeError) as error:
            _explain_kinds(self.criterion, outputs, targets, error)
            _explain_targets(self.criterion, outputs, targets, error)
            raise

    def outputs(self, model: Module, batch: object) -> tuple[object, object]:
        """(scores, targets), flattened to [items, classes] and [items] if the classes are the last dimension."""
        inputs, targets = pair(batch)
        if isinstance(inputs, dict):
            outputs = model(**inputs)
        else:
            outputs = model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)
        if not _is_tensor(outputs) or not _is_tensor(targets) or outputs.dim() <= 2:
            return outputs, targets
        indices = not targets.is_floating_point() and outputs.dim() == targets.dim() + 1
        if indices and outputs.shape[:-1] == targets.shape:
            if outputs.shape[:1] + outputs.shape[2:] == targets.shape:
                raise UsageError(
                    f"the model returns {list(outputs.shape)}, and the targets are {list(targets.shape)}",
                    limit="the classes may be its last dimension or, as torch's criteria take them, its second",
                    remedy="flatten both to [items, classes] and [items] in the model, or in a loss_fn of your own",
                )
            return outputs.flatten(0, -2), targets.flatten()
        return outputs, targets

    def count_terms(self, batch: object) -> Tensor | float | None:
        """How many terms the criterion's mean has: the weight of the valid targets; None if it sums instead."""
        if _setting(self.criterion, "reduction") == "sum":
            pair(batch)
            return None
        return self._terms(batch)

    def _terms(self, batch: object) -> Tensor | float:
        import torch

        targets = pair(batch)[1]
        if not isinstance(targets, torch.Tensor):
            return batch_length(batch)
        ignored = _setting(self.criterion, "ignore_index")
        if targets.is_floating_point() or ignored is None:
            return targets.numel()
        valid, class_weights = targets != ignored, _setting(self.criterion, "weight")
        if isinstance(class_weights, torch.Tensor) and class_weights.dim() == 1:  # a criterion's own may be anything
            valid = class_weights[targets.clamp(0, len(class_weights) - 1)] * valid
        total: Tensor = valid.sum()
        return total

    def metrics(self, model: Module, batch: object) -> dict[str, object]:
        """For `evaluate`: the loss of each valid target, for class indices whether the best class is right, and the
        metrics over all outputs."""
        outputs, targets = self.outputs(model, batch)
        loss, terms = self._loss(outputs, targets).double(), self._terms(batch)
        found: dict[str, object] = {"loss": (loss if self.count_terms(batch) is None else loss * terms, terms)}
        if _is_tensor(outputs) and _are_classes(targets) and outputs.dim() == targets.dim() + 1:
            ignored = _setting(self.criterion, "ignore_index")
            valid = targets != (-100 if ignored is None else ignored)
            right = (outputs.argmax(1) == targets) & valid
            found["accuracy"] = (right.sum(), valid.sum())
            if self.over_all:
                outputs, targets = outputs.movedim(1, -1)[valid], targets[valid]
        return found | {name: over_all(metric, outputs, targets) for name, metric in self.over_all.items()}


def supervised(criterion: Callable[..., Tensor], *, metrics: Mapping[str, MetricLike] | None = None) -> Supervised:
    """A loss function for batches that are (inputs, targets), such as `supervised(nn.CrossEntropyLoss())`.

    `metrics`: further metrics over all outputs, by name, which `evaluate` returns besides loss and accuracy. Each is a
    function of (outputs, targets) or an object of torchmetrics, as for `flatout.over_all`. With class indices it gets
    the valid targets, [items], and their scores, [items, classes].

    Raises UsageError if one cannot be called like that, and for reduction 'none': a step needs one number.
    """
    limit, remedy = "it is called as criterion(outputs, targets)", "for example torch.nn.CrossEntropyLoss()"
    as_function(criterion, "criterion", 2, limit=limit, remedy=remedy)
    if _setting(criterion, "reduction") == "none":
        raise UsageError(
            "the criterion's reduction is 'none'", limit="a step minimises one number", remedy="use 'mean' or 'sum'"
        )
    if not isinstance(metrics, Mapping | None):
        limit = "it maps names to functions of (outputs, targets) or metric objects"
        raise wrong("metrics", metrics, limit, 'for example {"f1": f1_score}')
    for metric in (metrics or {}).values():
        as_metric(metric)
    return Supervised(criterion, metrics)


def _setting(criterion: Callable[..., Tensor], name: str) -> Any:  # a number, a tensor or a text, by its name
    """`ignore_index`, `weight` or `reduction` of a criterion: a module's, one that functools.partial sets, or the
    default of torch's function; None where it has none."""
    given = criterion.keywords if isinstance(criterion, functools.partial) else {}
    function = criterion.func if isinstance(criterion, functools.partial) else criterion
    if name in given:
        return given[name]
    if inspect.isfunction(function) and function.__module__ == "torch.nn.functional":
        parameter = inspect.signature(function).parameters.get(name)
        return None if parameter is None else parameter.default
    return getattr(function, name, None)


_ELEMENTWISE = ("MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "BCELoss", "BCEWithLogitsLoss")


class LanguageModelLoss:
    """Cross-entropy of (tokens, targets), both [batch, tokens]; targets of -100 count as none.

    For models whose forward takes (tokens, targets=...) and returns the mean loss: `models.GPT2`,
    `models.TransformerLM`.
    """

    def __call__(self, model: Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, targets = batch
        loss: Tensor = model(tokens, targets=targets)
        return loss

    def count_terms(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (batch[1] != -100).sum()


def _is_tensor(value: object) -> TypeGuard[Tensor]:
    """A tensor, or an object with its methods."""
    return hasattr(value, "dim")


def _are_classes(targets: object) -> TypeGuard[Tensor]:
    import torch

    return isinstance(targets, torch.Tensor) and not targets.is_floating_point()


def _check_elementwise(criterion: object, outputs: object, targets: object) -> None:
    """[64, 1] against [64] broadcasts to [64, 64]: it trains, but not what was meant."""
    if type(criterion).__name__ not in _ELEMENTWISE or not hasattr(outputs, "shape") or not hasattr(targets, "shape"):
        return
    if outputs.shape != targets.shape:
        raise UsageError(
            f"the model returns {list(outputs.shape)} and the targets are {list(targets.shape)}",
            limit=f"{type(criterion).__name__} compares them element by element",
            remedy="give both the same shape: squeeze the output or unsqueeze the targets",
        )


def _explain_kinds(criterion: object, outputs: object, targets: object, error: Exception) -> None:
    """Raise a UsageError if a criterion of torch was given something else than tensors; one's own may take it."""
    module = getattr(criterion.func if isinstance(criterion, functools.partial) else criterion, "__module__", "")
    if module not in ("torch.nn.functional", "torch.nn.modules.loss") or is_numpy_array(targets):  # explained elsewhere
        return
    limit = "supervised() passes what it returns to the criterion, which takes a tensor"
    remedy = "write a loss_fn(model, batch) that takes the scores out of it, or return them alone"
    of_outputs = outputs, "the model returns", limit, remedy
    of_targets = (
        targets,
        "the targets are",
        "the criterion compares two tensors",
        "convert them: torch.as_tensor(targets)",
    )
    for value, which, limit, remedy in (of_outputs, of_targets):
        if not _is_tensor(value):
            raise UsageError(f"{which} {described(value)}", limit=limit, remedy=remedy) from error


def _explain_targets(criterion: Callable[..., Tensor], outputs: object, targets: object, error: Exception) -> None:
    """Raise a UsageError that says what is wrong with the class indices, if they are the cause."""
    if not _is_tensor(outputs) or not _is_tensor(targets):
        return
    name = type(criterion).__name__
    if name in ("BCELoss", "BCEWithLogitsLoss") and not targets.is_floating_point():
        limit = f"{name} compares them with probabilities, as floating-point numbers"
        raise UsageError(f"the targets are {targets.dtype}", limit=limit, remedy="use targets.float()") from error
    if name not in ("CrossEntropyLoss", "NLLLoss"):
        return
    classes = outputs.shape[1] if outputs.dim() > 1 else 0
    shapes = f"the model returns {list(outputs.shape)} and the targets are {list(targets.shape)} {targets.dtype}"
    per_item = [*outputs.shape[:1], *outputs.shape[2:]]
    if list(targets.shape) == per_item and str(targets.dtype) not in ("torch.int64", "torch.uint8"):
        limit, remedy = "class indices are int64", "use targets.long()"
    elif list(targets.shape) not in (per_item, list(outputs.shape)):
        limit, remedy = f"there is one class index for each of {per_item}", "check how the batch is put together"
    elif (stray := _no_class(targets, classes, _setting(criterion, "ignore_index"))) is not None:
        shapes = f"a target is class {stray}"
        limit, remedy = f"the model has {classes} classes, 0 to {classes - 1}", "give its last layer more outputs"
        if stray < 0:
            remedy = "number the classes from 0; for items without one, pass the criterion ignore_index"
    else:
        return
    raise UsageError(shapes, limit=limit, remedy=remedy) from error


def _no_class(targets: Tensor, classes: int, ignored: int | None) -> int | None:
    """A target that is no class, and is not ignored; of several the largest or, if that is one, the lowest."""
    if targets.is_floating_point():
        return None
    counted = targets[targets != ignored]
    ends = (int(counted.max()), int(counted.min())) if counted.numel() else ()
    return next((one for one in ends if not 0 <= one < classes), None)


def pair(batch: object) -> tuple[object, object]:
    """(inputs, targets) of a batch that is a pair; UsageError for any other."""
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    shape = f"{type(batch).__name__} of {len(batch)}" if hasattr(batch, "__len__") else type(batch).__name__
    raise UsageError(
        f"the batch is a {shape}",
        limit="supervised() takes batches that are (inputs, targets)",
        remedy="write your own loss_fn(model, batch) -> loss",
    )
