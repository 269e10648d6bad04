"""Attention written by hand, found in a traced graph and put through torch's fused kernel.

What is looked for, in the order in which a script computes it:

    scores = query @ key^T                    matmul, bmm or einsum
    scores = scores * a, / b, + bias, masked_fill(mask, value), float()   any of them, in any order
    weights = softmax(scores, last dimension)
    output = weights @ value

None of the intermediate values may be used elsewhere, because the fused kernel never has them in memory. Weights that
are dropped out are left alone: the kernel would draw other random numbers than the script.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn import functional

CASTS = {"float", "to", "type_as", "type", "contiguous"}
PRODUCTS = {"matmul", "bmm", "__matmul__"}


@dataclass
class Scores:
    """The way from the product of queries and keys to the softmax."""

    query: Node | None = None
    key: Node | None = None
    key_is_transposed: bool = True
    """[..., features, keys], as a product takes it; False: [..., keys, features], as an equation names it."""
    scale: float = 1.0
    added: list[tuple[Any, float]] = field(default_factory=list)
    """(bias, factor that it is scaled with after it was added)"""
    filled: list[tuple[Any, float]] = field(default_factory=list)
    """(mask, value put where it is true, as the softmax sees it)"""


def fuse_attention(graph_module: GraphModule) -> int:
    """Replace each attention of `graph_module` in place; returns how many there were."""
    graph, replaced = graph_module.graph, 0
    for node in list(graph.nodes):
        found = _weights_and_value(node)
        softmax = found and _softmax_below(found[0])
        scores = softmax and _scores(_argument(softmax, 0, "input"))
        if not (found and scores):
            continue
        with graph.inserting_before(node):
            fused = graph.call_function(
                attend,
                (scores.query, scores.key, found[1], scores.key_is_transposed, scores.scale),
                {"added": tuple(scores.added), "filled": tuple(scores.filled)},
            )
        node.replace_all_uses_with(fused)
        replaced += 1
    if replaced:
        graph.eliminate_dead_code()
        graph_module.recompile()
    return replaced


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_is_transposed: bool,
    scale: float,
    *,
    added: tuple[tuple[Any, float], ...],
    filled: tuple[tuple[Tensor, float], ...],
) -> Tensor:
    """softmax(scale * query @ key^T + biases, filled where masked) @ value.

    query: [..., queries, features]; value: [..., keys, value features]; key as `key_is_transposed` says. A finite
    value to fill with is added, so a row that is masked whole gets other weights than a script's own code would give.
    """
    key = key.transpose(-2, -1) if key_is_transposed else key
    kept: Tensor | None = None
    bias: Tensor | None = None
    for mask, fill in filled:
        if fill == -math.inf:
            kept = ~mask if kept is None else kept & ~mask
        else:
            bias = _sum(bias, torch.zeros((), dtype=query.dtype, device=query.device).masked_fill(mask, fill))
    for term, factor in added:
        bias = _sum(bias, (term * factor if factor != 1.0 else term).to(query.dtype))
    if bias is not None and kept is not None:
        bias, kept = bias.masked_fill(~kept, -math.inf), None
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=kept if bias is None else bias, scale=scale
    )


def _sum(a: Tensor | None, b: Tensor) -> Tensor:
    return b if a is None else a + b


def _weights_and_value(node: Node) -> tuple[Node, Node] | None:
    """The factors of a product that may be the attention's last."""
    if _called(node) == "einsum":
        factors = _einsum_factors(node)
        if factors is None:
            return None
        left, right, (a, b, out) = factors
        fits = a[:-2] == b[:-2] == out[:-2] and a[-1] == b[-2] and out[-2:] == a[-2] + b[-1]
        return (left, right) if fits and a[-1] not in out else None
    if _called(node) not in PRODUCTS:
        return None
    left, right = _argument(node, 0, "input"), _argument(node, 1, "other", "mat2")
    return (left, right) if isinstance(left, Node) and isinstance(right, Node) else None


def _softmax_below(node: Any) -> Node | None:
    """The softmax over the last dimension that `node` is, through casts and a dropout that is off."""
    while isinstance(node, Node) and len(node.users) == 1:
        name = _called(node)
        if name == "softmax":
            return node if _argument(node, 1, "dim") == -1 else None
        off = name == "dropout" and (_argument(node, 2, "training") is False or _argument(node, 1, "p") == 0)
        if name not in CASTS and not off:
            return None
        node = _argument(node, 0, "input")
    return None


def _scores(node: Any) -> Scores | None:
    """Walk from the softmax's input up to the product; None where something else stands between."""
    found, factor = Scores(), 1.0
    while isinstance(node, Node) and len(node.users) == 1:
        name = _called(node)
        first, second = _argument(node, 0, "input"), _argument(node, 1, "other", "mask", "mat2")
        if name in PRODUCTS or name == "einsum":
            return _with_product(found, node, factor)
        if name in CASTS:
            pass
        elif name in ("mul", "div", "truediv", "imul", "itruediv"):
            if isinstance(first, int | float) and name == "mul":
                first, second = second, first
            if isinstance(second, bool) or not isinstance(second, int | float) or not second:
                return None
            factor *= second if "mul" in name else 1 / second
        elif name in ("add", "iadd"):
            first, second = (second, first) if _leads_to_product(second) else (first, second)
            if not isinstance(second, Node) or _argument(node, 2, "alpha") not in (None, 1):
                return None
            found.added.append((second, factor))
        elif name in ("masked_fill", "masked_fill_"):
            fill = _argument(node, 2, "value")
            if not isinstance(second, Node) or not isinstance(fill, int | float) or fill * factor > -1e3:
                return None  # a value that softmax does not take for zero
            found.filled.append((second, float(fill) * factor))
        else:
            return None
        node = first
    return None


def _with_product(found: Scores, node: Node, factor: float) -> Scores | None:
    found.scale = factor
    if _called(node) == "einsum":
        factors = _einsum_factors(node)
        if factors is None:
            return None
        found.query, found.key, (a, b, out) = factors
        found.key_is_transposed = False
        return found if a[:-2] == b[:-2] == out[:-2] and a[-1] == b[-1] and out[-2:] == a[-2] + b[-2] else None
    query, key = _argument(node, 0, "input"), _argument(node, 1, "other", "mat2")
    found.query, found.key = query, key
    return found if isinstance(query, Node) and isinstance(key, Node) else None


def _einsum_factors(node: Node) -> tuple[Node, Node, tuple[str, str, str]] | None:
    equation = node.args[0] if node.args else None
    operands = node.args[1] if len(node.args) == 2 and isinstance(node.args[1], tuple | list) else node.args[1:]
    if not isinstance(equation, str) or len(operands) != 2 or "." in equation or "->" not in equation:
        return None
    inputs, _, out = equation.replace(" ", "").partition("->")
    a, _, b = inputs.partition(",")
    left, right = operands
    if min(len(a), len(b), len(out)) < 2 or not (isinstance(left, Node) and isinstance(right, Node)):
        return None
    return left, right, (a, b, out)


def _leads_to_product(node: Any) -> bool:
    """Is this the side of a sum that the scores come from?"""
    while isinstance(node, Node) and node.args:
        name = _called(node)
        if name in PRODUCTS or name == "einsum":
            return True
        if name not in CASTS | {"mul", "div", "truediv"}:
            return False
        node = node.args[0]
    return False


def _called(node: Node) -> str:
    """The name of what a node calls, the same for functions, methods and operators."""
    if node.op == "call_method":
        return str(node.target)
    if node.op != "call_function":
        return ""
    return str(getattr(node.target, "__name__", ""))


def _argument(node: Node, position: int, *names: str) -> Any:
    """An argument given by place or by one of its names; None where it was not given."""
    if position < len(node.args):
        return node.args[position]
    return next((node.kwargs[name] for name in names if name in node.kwargs), None)
