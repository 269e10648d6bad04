"""What the statements around an attention in a traced graph change, and what becomes of its result.

The fused call stands where the last product was and reads everything there, so nothing that was read earlier may have
changed by then; nor may it change later, because the kernel keeps for its backward pass what a product or a sum does
not. Which tensors share memory is known from the tensors without data with which the graph was traced.
"""

from __future__ import annotations

import builtins
import inspect
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

KNOWN = (torch, functional, operator, math, builtins, Tensor, torch.special, torch.linalg, torch.fft)
"""Where the functions live that change their arguments only if name or arguments say so, and no mode of torch's."""
WRITING = {
    "iadd",
    "iand",
    "iconcat",
    "ifloordiv",
    "ilshift",
    "imatmul",
    "imod",
    "imul",
    "ior",
    "ipow",
    "irshift",
    "isub",
}
WRITING |= {"itruediv", "ixor", "setitem", "delitem"}
WRITING_METHODS = {f"__{name}__" for name in WRITING}

MOVES = {"transpose", "permute", "swapaxes", "swapdims", "movedim", "unsqueeze", "reshape", "flatten", "mT", "T"}
"""Right for any strides, though the result may be a view where it was a copy."""
VIEWS = {"view", "view_as", "unflatten", "squeeze"}
READERS = {"linear", "matmul", "bmm", "__matmul__"}
"""What they return depends neither on the strides nor on the memory of their first argument."""
QUESTIONS = {"size", "dim", "shape", "dtype", "device"}


def called(node: Node) -> str:
    """The name of what a node calls, which is the same for functions, methods and operators."""
    if node.op == "call_method":
        return str(node.target)
    if node.op != "call_function":
        return ""
    return str(getattr(node.target, "__name__", ""))


def reads_the_same_at_its_end(chain: list[Node], harmless: Callable[..., Tensor]) -> bool:
    """Would every node of `chain` read the same if it ran in the last one's place, and the backward pass as well?

    No mode (of gradients, of autocast) may change inside either: a function that is not known may be one that does.
    """
    nodes = list(chain[0].graph.nodes)
    place, own = {node: index for index, node in enumerate(nodes)}, set(chain)
    first, last = min(place[node] for node in chain), max(place[node] for node in chain)
    read: set[StorageWeakRef] = set()
    for node in nodes[first:]:
        if node in own:
            read = read.union(*(_storages(operand) for operand in node.all_input_nodes if operand not in own))
            continue
        changed = [] if node.target is harmless else may_change(node)
        if changed is None and place[node] < last:
            return False
        touched = node.all_input_nodes if changed is None else changed
        if any(read & _storages(one) for one in touched):
            return False
    return True


def is_only_read(result: Node) -> bool:
    """Can nobody tell where in memory `result` lies: its strides, or a change of it or of a view of it?"""
    waiting = [(result, False)]
    while waiting:
        node, is_contiguous = waiting.pop()
        for user in node.users:
            name = called(user)
            name = str(user.args[1]) if name == "getattr" else name
            if may_change(user) != []:
                return False
            if name in MOVES or (is_contiguous and name in VIEWS):
                waiting.append((user, is_contiguous))
            elif name == "contiguous" and len(user.args) == 1 and not user.kwargs:
                waiting.append((user, True))
            elif name not in QUESTIONS and not (name in READERS and user.args and user.args[0] is node):
                return False
    return True


def may_change(node: Node) -> list[Node] | None:
    """The arguments that a node may change in place; None: it may do anything."""
    inputs, name = node.all_input_nodes, called(node)
    if node.op in ("placeholder", "get_attr", "output"):
        return []
    if node.kwargs.get("out") is not None:
        return inputs
    if node.op == "call_method":
        writes = name in WRITING_METHODS or (name.endswith("_") and not name.endswith("__"))
        return inputs[:1] if writes else []
    if name.startswith("set_") or not any(getattr(space, name, None) is node.target for space in KNOWN):
        return None
    if node.target is getattr(operator, name, None):
        return inputs[:1] if name in WRITING else []
    return inputs if name.endswith("_") or _is_told_to_write(node) else []


def _is_told_to_write(node: Node) -> bool:
    if "inplace" in node.kwargs:
        return node.kwargs["inplace"] is not False
    function: Any = node.target
    try:
        given = inspect.signature(function).bind(*node.args, **node.kwargs).arguments
    except (TypeError, ValueError):  # a builtin, which takes no such argument by position
        return False
    return given.get("inplace", False) is not False


def _storages(node: Node) -> set[StorageWeakRef]:
    """The memory in which the values of a node lie."""
    value = node.meta.get("example_value")
    values = value if isinstance(value, tuple | list) else [value]
    return {StorageWeakRef(one.untyped_storage()) for one in values if isinstance(one, Tensor)}
