"""What nodes of an autograd graph have saved. Importing this imports nothing, torch included.

There is no public equivalent; an attribute that another torch lacks counts as not there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_SUM = 2
"""As torch numbers reductions: 0 none, 1 mean, 2 sum."""


@dataclass(frozen=True, kw_only=True)
class CrossEntropyTerms:
    """Of one cross-entropy."""

    total: Tensor
    """The number of its targets, without those that are ignored; with weights of classes, the sum of theirs."""
    targets: int


def is_sum(node: object) -> bool:
    """Is it a loss of torch.nn.functional with reduction='sum'?"""
    return getattr(node, "_saved_reduction", None) == _SUM


def cross_entropy_terms(node: object) -> CrossEntropyTerms | None:
    """None where it is no cross-entropy, or its graph has been freed."""
    try:
        total, target = getattr(node, "_saved_total_weight", None), getattr(node, "_saved_target", None)
    except RuntimeError:
        return None
    if total is None or target is None:
        return None
    return CrossEntropyTerms(total=total, targets=target.numel())


def selects_by_mask(node: object) -> bool:
    """Does it take those elements for which a mask is True?"""
    if type(node).__name__.startswith("MaskedSelect"):
        return True
    try:
        indices = getattr(node, "_saved_indices", None) or ()
    except RuntimeError:
        return False
    return any(one is not None and str(one.dtype) in ("torch.bool", "torch.uint8") for one in indices)


def constant_divisor(node: object) -> float | None:
    """The number that a division divides by; None where it is no single number, or is not known."""
    tensor = _saved_other(node)
    return float(tensor.detach()) if tensor is not None and tensor.numel() == 1 else None


def multiplies_data(node: object) -> bool:
    """Is it a product with, or a division by, a tensor that needs no gradient and is no single number?"""
    other = _saved_other(node)
    inputs = getattr(node, "next_functions", ())
    return other is not None and other.numel() > 1 and any(one is None for one, _ in inputs)


def _saved_other(node: object) -> Tensor | None:
    try:
        found: Tensor | None = getattr(node, "_saved_other", None)
    except RuntimeError:
        return None
    return found if hasattr(found, "numel") else None
