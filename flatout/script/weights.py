"""Do the weights change between two backward passes? Then a script updates them by hand, with no optimizer.

The leaves of the loss's graph are followed (not a model: the script may have none), and the first elements of a few
of them are compared. Only used during the first passes of a script in which no optimizer has stepped.
"""

from __future__ import annotations

from typing import Any

WATCHED_LEAVES = 3
WATCHED_ELEMENTS = 64
GRAPH_LIMIT = 20_000


class WeightProbe:
    """Remembers a few elements of a few leaves at the end of a pass, and compares them at the start of the next."""

    def __init__(self) -> None:
        self.fresh = False
        """True if the leaves of the last `changed` were all unknown to the pass before: the weights are made anew."""
        self._leaves: list[Any] = []
        self._values: list[Any] = []

    def changed(self, roots: tuple[Any, ...]) -> bool:
        """True if a leaf that had a gradient differs from what `remember` saw; also finds the leaves of `roots`."""
        before = list(zip(self._leaves, self._values, strict=False))
        self._leaves = graph_leaves(roots, WATCHED_LEAVES)
        known = {id(leaf) for leaf, _ in before}
        self.fresh = bool(self._leaves) and not any(id(leaf) in known for leaf in self._leaves)
        return any(not bool((_sample(leaf) == value).all()) for leaf, value in before)

    def remember(self) -> None:
        self._values = [_sample(leaf) for leaf in self._leaves]

    def forget(self) -> None:
        """Let go of the leaves: a script may drop its model and count on the memory."""
        self._leaves, self._values = [], []


def graph_leaves(roots: tuple[Any, ...], limit: int | None = None) -> list[Any]:
    """The leaf tensors that a backward pass from `roots` reaches, nearest first."""
    todo = [root.grad_fn for root in roots if getattr(root, "grad_fn", None) is not None]
    seen: set[Any] = set(todo)
    leaves: list[Any] = []
    while todo and len(seen) < GRAPH_LIMIT:
        node = todo.pop(0)
        variable = getattr(node, "variable", None)
        if variable is not None:
            leaves.append(variable)
            if limit is not None and len(leaves) >= limit:
                break
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)
    return leaves


def _sample(tensor: Any) -> Any:
    return tensor.detach().reshape(-1)[:WATCHED_ELEMENTS].clone()
