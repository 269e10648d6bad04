"""Autograd's graphs: which live tensors hold which graph, and so which storages that no variable names.

A node remembers what it needs for its backward pass until that pass has run. What is saved there is held by every
tensor from which the node can be reached. Sequence numbers count a thread's nodes, so they order nodes in time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor
from torch.autograd.graph import Node

from flatout.memory.tracking import identity
from flatout.torch_private.dispatch import disable_current_modes, next_node_number, node_number

MOST_NODES = 200_000
_NO_NUMBER = 1 << 63
"""Nodes of leaves have the largest number there is, which says nothing of their age."""


@dataclass
class Graph:
    """What one live tensor holds by its graph."""

    root: Tensor
    numbers: list[int] = field(default_factory=list)
    """Sequence numbers of its nodes."""
    saved: set[int] = field(default_factory=set)
    """Identities of the storages that its nodes saved."""


def newest_number() -> int:
    """The sequence number that the next node will have."""
    return next_node_number()


def live_tensors() -> list[Tensor]:
    """Every tensor that Python holds."""
    return [one for one in gc.get_objects() if issubclass(type(one), Tensor)]


def graphs_of(tensors: Sequence[Tensor], since: int) -> list[Graph]:
    """The graphs of tensors that have one; nodes older than `since` are not followed."""
    with disable_current_modes():
        roots = [one for one in tensors if one.grad_fn is not None]
        budget = [MOST_NODES]
        return [_graph(root, since, budget) for root in roots]


def saved_tensors_of(tensors: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
    """(node's kind, tensor) for what the graphs of these tensors saved and no backward pass has freed."""
    with disable_current_modes():
        seen: set[Node] = set()
        todo: list[Node | None] = [one.grad_fn for one in tensors if one.grad_fn is not None]
        while todo and len(seen) < MOST_NODES:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            for tensor in _saved(node):
                yield type(node).__name__, tensor
            todo += [after for after, _ in node.next_functions]


def _graph(root: Tensor, since: int, budget: list[int]) -> Graph:
    graph = Graph(root)
    seen: set[Node] = set()
    todo = [root.grad_fn]
    while todo and budget[0] > 0:
        node = todo.pop()
        if node is None or node in seen:
            continue
        number: int = node_number(node)
        if number < since or number >= _NO_NUMBER:
            continue
        seen.add(node)
        budget[0] -= 1
        graph.numbers.append(number)
        graph.saved.update(identity(tensor) for tensor in _saved(node))
        todo += [following for following, _ in node.next_functions]
    return graph


_names: dict[type, tuple[str, ...]] = {}


def _saved(node: Node) -> Iterator[Tensor]:
    kind = type(node)
    if kind not in _names:
        _names[kind] = tuple(name for name in dir(kind) if name.startswith("_saved_") or name == "saved_tensors")
    for name in _names[kind]:
        try:
            value = getattr(node, name)
        except RuntimeError:  # its backward has run: nothing is saved any more
            continue
        for one in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(one, Tensor):
                yield one
