"""What the graph of a loss shows: how the loss was reduced, which nodes it has, and which parameters it reaches."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from flatout.torch_private.attributes import LOSS_REDUCTION

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.autograd.graph import Node

MOST_NODES = 20_000
MEANS = (
    "MeanBackward", "NllLoss", "MseLoss", "CrossEntropy", "BinaryCrossEntropy", "SmoothL1", "L1Loss", "KlDiv", "Huber",
)  # fmt: skip
REDUCTIONS = {1: "mean", 2: "sum"}
"""As the nodes of losses number them."""
RESHAPES = (
    "ToCopy", "View", "Reshape", "UnsafeView", "Transpose", "Permute", "TBackward", "Squeeze", "Unsqueeze", "Clone",
    "Alias", "Slice", "Select",
)  # fmt: skip
"""Operations that leave values as they are, but for their rounding."""
MOST_RESHAPES = 8


def end_of_graph(root: Tensor, scaler: bool) -> tuple[bool, str]:
    """(does the graph end with a division or product?, 'mean' or 'sum' as its last reduction).

    scaler: a gradient scaler is on, whose own product comes last.
    """
    node: Node | None = root.grad_fn
    scaled, skipped = False, not scaler
    for _ in range(6):
        if node is None:
            break
        name = type(node).__name__
        if name.startswith(("DivBackward", "MulBackward")):
            scaled, skipped = scaled or skipped, True
        elif name.startswith("SumBackward"):
            return scaled, "sum"
        elif name.startswith(MEANS):
            return scaled, REDUCTIONS.get(getattr(node, LOSS_REDUCTION, 1), "")
        elif not name.startswith(("ToCopy", "View", "Squeeze", "Add", "Neg", "Clone", "Alias")):
            break
        following = [one for one, _ in node.next_functions if one is not None]
        node = following[0] if following else None
    return scaled, ""


def numbers_of(root: Tensor) -> frozenset[int] | None:
    """Sequence numbers of the nodes of its graph; None where there are too many."""
    from flatout.torch_private.dispatch import node_number

    nodes = _nodes(root)
    if nodes is None:
        return None
    return frozenset(number for node in nodes if (number := node_number(node)) < 1 << 62)  # leaves have the largest


def parameters_of(root: Tensor) -> tuple[nn.Parameter, ...]:
    """The parameters that its backward pass reaches; none where the graph has too many nodes."""
    from torch.nn import Parameter

    found = (getattr(node, "variable", None) for node in _nodes(root) or ())
    return tuple(one for one in found if isinstance(one, Parameter))


def takes_softmax_twice(root: Tensor) -> bool:
    """Does its graph have a log_softmax of what a softmax gives, with nothing but changes of shape or dtype between?"""
    return any(
        _comes_from_softmax(node) for node in _nodes(root) or () if type(node).__name__.startswith("LogSoftmaxBackward")
    )


def _comes_from_softmax(node: Node) -> bool:
    at: Node | None = node
    for _ in range(MOST_RESHAPES):
        at = at.next_functions[0][0] if at is not None and at.next_functions else None
        name = type(at).__name__
        if name.startswith("SoftmaxBackward"):
            return True
        if not name.startswith(RESHAPES):
            return False
    return False


def _nodes(root: Tensor) -> list[Node] | None:
    """All nodes of its graph; None where there are too many."""
    found = list(itertools.islice(graph_nodes(root), MOST_NODES + 1))
    return found if len(found) <= MOST_NODES else None


def graph_nodes(*roots: Tensor) -> Iterator[Node]:
    """The nodes that a backward pass from these passes, nearest first."""
    todo = deque(node for root in roots if (node := getattr(root, "grad_fn", None)) is not None)
    seen = set(todo)
    while todo:
        node = todo.popleft()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)
