"""How much the loss of a rank's share counts in the loss of the whole batch.

    mean    over samples: by the number of samples. Where all ranks have as many, the mean over ranks is that over all
    sum     over samples: the ranks' gradients are added
    terms   a cross-entropy over those targets that are not ignored, or weighted by class: by their sum of weights

The first passes of a run are looked at: a loss that ends in a sum, or a cross-entropy that left targets out, is not the
mean over samples that is assumed. What a graph does not show (a sum that is divided by the batch size of the script's
arguments, a contrastive loss between samples) only the proof shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from flatout.torch_private.graphs import cross_entropy_terms, is_sum

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd.graph import Node

LOOKED_AT = 8
"""Backward passes of a run whose losses are looked at."""
MOST_NODES = 64
_CROSS_ENTROPY, _SUM = "NllLoss", "SumBackward"
_SCALED = ("DivBackward", "MulBackward", "ToCopy", "Clone", "Alias", "Neg")
_ADDED = ("AddBackward", "SubBackward")


def terms_of(loss: Tensor) -> float | None:
    """Of a loss that is one cross-entropy: the number of targets that are not ignored, or the sum of their weights.
    None for any other. Waits for the device."""
    nodes = list(_parts(loss, _SCALED))
    found = cross_entropy_terms(nodes[0]) if len(nodes) == 1 else None
    return None if found is None else float(found.total)


def complaint(loss: Tensor) -> tuple[str, str] | None:
    """(what speaks against a mean over samples, which --loss it is instead); None: nothing does."""
    for node in _parts(loss, (*_SCALED, *_ADDED)):
        if is_sum(node):
            return f"the loss has a part with reduction='sum' ({type(node).__name__.partition('Backward')[0]})", "sum"
        if type(node).__name__.startswith(_SUM):
            return "the loss ends in a sum", "sum"
        found = cross_entropy_terms(node)
        if found is not None and float(found.total) != found.targets:
            weights = float(found.total)
            return (
                f"the loss is a cross-entropy of {found.targets} targets with a weight of {weights:g} in all, as with "
                "ignored targets or weights of classes",
                "terms",
            )
    return None


def _parts(loss: Tensor, passed: tuple[str, ...]) -> Iterator[Node]:
    """The nodes from which the loss is made by the `passed` operations on scalars."""
    todo = [loss.grad_fn]
    for _ in range(MOST_NODES):
        node = todo.pop() if todo else None
        if node is None:
            return
        if not type(node).__name__.startswith(passed):
            yield node
            continue
        todo += [one for one, _ in node.next_functions if one is not None and type(one).__name__ != "AccumulateGrad"]
