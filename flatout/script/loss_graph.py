"""What the graph of a loss shows: how the loss was reduced, which nodes it has, and which parameters it reaches."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from flatout.torch_private.attributes import LOSS_REDUCTION, NODE_OUTPUTS

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
BY_ELEMENT = ("Pow", "Abs", "Sqrt", "Log", "Cosh", "Mean", "Sum", "Div", "Add", "Neg", "Mul", "Square")
"""Operations between a difference and the loss that is made of it: any other, such as a softmax or a kernel, may want
all pairs."""
MOST_BY_ELEMENT = 16


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


def pairs_of(root: Tensor) -> tuple[list[int], list[int]] | None:
    """Shapes of predictions and targets, [80, 1] and [80] or the other way round, where the loss is made of differences
    between each of the first and each of the second: by hand, `(predictions - targets).pow(2).mean()`.

    Not where the script made the dimension that is broadcast, or a gradient reaches both sides: pairs are meant then.
    """
    todo = deque([root.grad_fn] if root.grad_fn is not None else [])
    for _ in range(MOST_BY_ELEMENT):
        if not todo:
            return None
        node = todo.popleft()
        name, inputs = type(node).__name__, [one for one, _ in node.next_functions if one is not None]
        if name.startswith("SubBackward") and len(inputs) == 1 and _shape(node):
            if found := _missing_dimension(inputs[0], _shape(node)):
                return found
        elif name.removesuffix("0").removesuffix("1").removesuffix("Backward") in BY_ELEMENT:
            if name.startswith("MulBackward") and _shape(node) and len(inputs) != len(node.next_functions):
                continue  # of a weight for each pair, perhaps
            todo.extend(dict.fromkeys(inputs))
    return None


def _missing_dimension(node: Node, together: list[int]) -> tuple[list[int], list[int]] | None:
    """node: what gives the predictions. together: the shape of their difference with the targets."""
    shape = _shape(node)
    if len(together) != 2 or together[0] != together[1] or together[0] == 1:
        return None
    column, row = [together[0], 1], [together[0]]
    if shape == column and not type(node).__name__.startswith(RESHAPES):
        return column, row
    squeezed = type(node).__name__.startswith(("Squeeze", "View", "Select"))
    return (row, column) if shape == row and squeezed else None


def _shape(node: Node) -> list[int]:
    """Of what it gives; [] for a number, or where torch does not say."""
    outputs = getattr(node, NODE_OUTPUTS, ())
    return list(outputs[0].shape) if outputs else []


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
