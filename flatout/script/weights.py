"""Do the weights change between two backward passes? Then a script updates them by hand, with no optimizer.

It follows the leaves of the loss's graph (not a model: the script may have none), and compares the first elements of a
few of them. Only used during the first passes of a script in which no optimizer has stepped.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from flatout.script.loss_graph import graph_nodes
from flatout.signals import raised_by_handler
from flatout.torch_private.late import dispatch

if TYPE_CHECKING:
    from torch import Tensor

WATCHED_LEAVES = 3
WATCHED_ELEMENTS = 64
GRAPH_LIMIT = 20_000


class WeightProbe:
    """Remembers a few elements of a few leaves at the end of a pass, and compares them at the start of the next."""

    def __init__(self) -> None:
        self.fresh = False
        """Were all leaves of the last `changed` unknown to the pass before? Then the weights are new tensors each
        time."""
        self._leaves: list[weakref.ref[Tensor]] = []  # weak: a script may free its model
        self._values: list[Tensor | None] = []
        self._failed = False

    def changed(self, roots: tuple[Tensor, ...]) -> bool:
        """True if a leaf that had a gradient differs from what `remember` saw; also finds the leaves of `roots`."""
        return not self._failed and self._guarded(lambda: self._changed(roots))

    def _changed(self, roots: tuple[Tensor, ...]) -> bool:
        pairs = ((leaf(), value) for leaf, value in zip(self._leaves, self._values, strict=False))
        before = [(leaf, value) for leaf, value in pairs if leaf is not None and value is not None]
        nodes = itertools.islice(graph_nodes(*roots), GRAPH_LIMIT)
        reached = (leaf for node in nodes if (leaf := getattr(node, "variable", None)) is not None)
        leaves: list[Tensor] = list(itertools.islice(reached, WATCHED_LEAVES))
        self._leaves = [weakref.ref(leaf) for leaf in leaves]
        known = {id(leaf) for leaf, _ in before}
        self.fresh = bool(leaves) and not any(id(leaf) in known for leaf in leaves)
        return any(not _same(_sample(leaf), value) for leaf, value in before)

    def remember(self) -> None:
        if not self._failed:
            self._guarded(self._remember)

    def _remember(self) -> bool:
        leaves = [leaf() for leaf in self._leaves]
        self._values = [None if leaf is None else _sample(leaf) for leaf in leaves]
        return True

    def forget(self) -> None:
        self._leaves, self._values = [], []

    def _guarded(self, look: Callable[[], bool]) -> bool:
        """Hidden from the script's own modes; after a failure it does not try again."""
        switches = dispatch()
        try:
            with switches.without_torch_dispatch(), switches.without_torch_function():
                return look()
        except Exception as error:  # tensor subclasses may refuse anything
            if raised_by_handler(error):
                raise
            self._failed = True
            self.forget()
            return False


def _same(one: Tensor, other: Tensor) -> bool:
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _sample(tensor: Tensor) -> Tensor:
    return _with_memory(tensor).detach().reshape(-1)[:WATCHED_ELEMENTS].clone()


def _with_memory(tensor: Tensor) -> Tensor:
    """The tensor itself, or one inside of it where it is only a wrapper, as a DTensor is: without its dispatch, to read
    a wrapper ends the process."""
    while flatten := getattr(tensor, "__tensor_flatten__", None):
        tensor = getattr(tensor, flatten()[0][0])
    if tensor.numel() and not tensor.data_ptr():
        raise TypeError(f"{type(tensor).__name__} has no memory of its own")
    return tensor
