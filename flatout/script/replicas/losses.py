"""How much the loss of a rank's share counts in the loss of the whole batch.

    mean    over samples: by the number of samples. Where all ranks have as many, the mean over ranks is that over all
    sum     over samples: the ranks' gradients are added
    terms   a cross-entropy over those targets that are not ignored, or weighted by class: by their sum of weights

The first passes of a run are looked at: a loss that ends in a sum or in a norm, a root or a ratio of means, a mean over
what a mask selects, or a cross-entropy that left targets out is not the mean over samples that is assumed. What a graph
does not show (a sum that is divided by the batch size of the script's arguments, a contrastive loss between samples)
only the proof shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flatout.torch_private.graphs import (
    constant_divisor,
    cross_entropy_terms,
    is_sum,
    multiplies_data,
    selects_by_mask,
)

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd.graph import Node

LOOKED_AT = 8
"""Backward passes of a run whose losses are looked at."""
MOST_NODES = 64
_SUM, _PRODUCTS = "Sum", {"Mul", "Div"}
_LINEAR = {"Div", "Mul", "Add", "Sub", "Rsub", "Neg", "ToCopy", "Clone", "Alias"}
_SCALED = _LINEAR - {"Add", "Sub", "Rsub"}
_BENT = {
    *("Sqrt", "Rsqrt", "Log", "Log1P", "Log2", "Log10", "Exp", "Expm1", "Pow", "Abs", "Reciprocal", "Sigmoid", "Tanh"),
    *("Softplus", "LogSigmoid", "Relu", "Clamp", "ClampMin", "ClampMax"),
}
"""Of a figure that was averaged already: not linear."""
_OF_THE_WHOLE = {"LinalgVectorNorm", "Norm", "Std", "Var", "Logsumexp", "Max", "Min", "Amax", "Amin", "Median"}
_REDUCED = {"Mean", "Sum", "MseLoss", "SmoothL1Loss", "HuberLoss"}
_ELEMENTWISE = {
    *(*_LINEAR, *_BENT, "Where", "LogSoftmax", "Softmax", "View", "ReshapeAlias", "UnsafeView", "Squeeze", "Unsqueeze"),
    *("Transpose", "Permute", "T", "Expand", "Stack", "Cat"),
}
"""Names of autograd's nodes, without 'Backward'."""


def terms_of(loss: Tensor) -> float | None:
    """Of a loss that is one cross-entropy: the number of targets that are not ignored, or the sum of their weights.
    None for any other. Waits for the device."""
    nodes = [node for node, _ in _parts_divided(loss, _SCALED)]
    found = cross_entropy_terms(nodes[0]) if len(nodes) == 1 else None
    return None if found is None else float(found.total)


@dataclass(frozen=True, kw_only=True)
class Complaint:
    """Why a loss is not taken for a mean over samples."""

    what: str
    instead: str = ""
    """What --loss may be, and when; '' where none of its values is right."""


def complaint(loss: Tensor, samples: int | None = None) -> Complaint | None:
    """samples: of this rank's share of the batch, if known. None: nothing speaks against a mean over samples.

    A part that is made of parameters alone (a penalty on weights) is the same on all ranks, whatever it is.
    """
    for node, divisor in _parts_divided(loss, _LINEAR):
        if not depends_on_batch(node):
            continue
        name = _name(node)
        if name in _OF_THE_WHOLE:
            return Complaint(what=f"the loss is {name} of all samples together, which is not a mean over them")
        if name in _BENT:
            return Complaint(what=f"the loss is {name} of what was averaged, so it is not a mean over samples itself")
        if name in _PRODUCTS:
            return Complaint(what="the loss is a product or a ratio of two figures of the batch")
        if (is_sum(node) or name == _SUM) and (divisor is None or divisor != samples):
            part = f"has a part with reduction='sum' ({name})" if is_sum(node) else "ends in a sum"
            if divisor is None or divisor == 1:
                return Complaint(what=f"the loss {part}", instead="sum")
            what = f"the loss {part}, divided by {divisor:g}"
            return Complaint(what=what, instead="sum where that number is the same on all devices")
        if (found := _uneven(node, samples)) is not None:
            return found
    return None


def _uneven(node: Node, samples: int | None) -> Complaint | None:
    """Does it average over a number of things that differs from share to share?"""
    found = cross_entropy_terms(node)
    if found is not None and float(found.total) != found.targets:
        return Complaint(
            what=f"the loss is a cross-entropy of {found.targets} targets with a weight of {float(found.total):g} in "
            "all, as with ignored targets or weights of classes",
            instead="terms",
        )
    if found is not None and samples and found.targets % samples:
        what = f"the loss is a cross-entropy of {found.targets} targets for {samples} samples"
        return Complaint(what=f"{what}: another number in each share", instead="terms")
    if _is_of_selected(node):
        what = "the loss is a mean over elements that a mask selects: another number in each share"
        return Complaint(what=what, instead="terms" if found is not None else "")
    return None


def _is_of_selected(reduction: Node) -> bool:
    """Are its elements selected by a mask, not far from it?"""
    todo = _inputs(reduction)
    for _ in range(MOST_NODES):
        node = todo.pop() if todo else None
        if node is None:
            return False
        if selects_by_mask(node):
            return True
        if _name(node) in _ELEMENTWISE:
            todo += _inputs(node)
    return False


def depends_on_batch(node: Node) -> bool:
    """False for what is computed from parameters and constants alone, as far as that can be seen: without any layer."""
    todo = [node]
    for _ in range(MOST_NODES):
        if not todo:
            return False
        one = todo.pop()
        name, inputs = _name(one), _inputs(one)
        alone = name in _ELEMENTWISE | _REDUCED | _OF_THE_WHOLE and not multiplies_data(one)
        of_weights = name in ("Mm", "Bmm") and len(inputs) == len(one.next_functions)
        if name != "AccumulateGrad" and not (alone or of_weights):
            return True
        todo += inputs
    return True


def _parts_divided(loss: Tensor, passed: AbstractSet[str]) -> Iterator[tuple[Node, float | None]]:
    """The parts, each with the number that it was divided by last; products and ratios of two parts as they are."""
    todo: list[tuple[Node | None, float | None]] = [(loss.grad_fn, None)]
    for _ in range(MOST_NODES):
        node, divisor = todo.pop() if todo else (None, None)
        if node is None:
            return
        if _name(node) not in passed:
            yield node, divisor
            continue
        inputs = [one for one in _inputs(node) if _name(one) != "AccumulateGrad"]
        if _name(node) in _PRODUCTS and (sum(map(depends_on_batch, inputs)) > 1 or _divides_by_figure(node)):
            yield node, divisor
            continue
        todo += [(one, constant_divisor(node) if _name(node) == "Div" else divisor) for one in inputs]


def _divides_by_figure(node: Node) -> bool:
    """Is it a quotient whose divisor depends on the batch?"""
    divisor = node.next_functions[-1][0] if _name(node) == "Div" and len(node.next_functions) > 1 else None
    return divisor is not None and depends_on_batch(divisor)


def _inputs(node: Node) -> list[Node]:
    return [one for one, _ in node.next_functions if one is not None]


def _name(node: Node) -> str:
    """'Mean' of a MeanBackward0."""
    return type(node).__name__.partition("Backward")[0]
