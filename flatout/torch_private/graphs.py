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
