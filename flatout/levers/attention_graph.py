"""Attention written by hand, found in a traced graph and replaced by torch's fused kernel.

The pattern, in the order in which a script computes it:

    scores = query @ key^T                    matmul, bmm or einsum
    scores = scores * a, / b, + bias, masked_fill(mask, value), float()   any of them, in any order
    weights = softmax(scores, last dimension)
    output = weights @ value

None of the intermediate values may be used elsewhere, because the fused kernel never has them in memory. Attention with
dropout on the weights is left alone: the kernel would draw other random numbers than the script.

Masks are checked at each call. The kernel is right where every query keeps a key: masked keys then weigh exactly 0,
whether they were filled with -1e9 or with -inf. Fully masked rows differ: with a finite value their weights are equal
and their scores get no gradient, with -inf they are NaN, and a bias of -1e9 swallows the logarithm from which the
kernel's backward pass takes the weights. So masks and biases are examined first (not the scores, which do not exist),
and where a row is not safe that call computes what the script says, in the script's order.

Only the nodes of the pattern are removed, none of which has a user outside. The fused call stands where the last
product was and reads everything there, so nothing that was read earlier may have changed by then; nor may it change
later, because the kernel keeps for its backward pass what a product or a sum does not. Which tensors share memory is
known from the tensors without data with which the graph was traced.
"""

from __future__ import annotations

import builtins
import inspect
import math
import operator
from dataclasses import dataclass, field
from typing import Any  # Any: nodes of a graph hold anything

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

CASTS = {"float", "to", "type_as", "type", "contiguous"}
PRODUCTS = {"matmul", "bmm", "__matmul__"}
UNDERSTOOD = (
    {"input", "other", "mask", "mat2", "value", "dim", "dtype", "alpha", "p", "training", "inplace", "_stacklevel"}
    | {"device", "copy", "non_blocking", "memory_format"}  # of a cast
)
"""Arguments by name; others, such as `rounding_mode` and `out`, change what a step computes or where it goes."""

SAFE_BIAS = 1e3
"""Above it, fp32 has too few digits left for the logarithm of a row's sum."""
UNDERFLOW = 104.0
"""exp(-104) is 0 in fp32: a score that far below the row's largest weighs nothing."""
ROUNDED_BIAS = 2**-8
"""By how much a bias may change in the kernel's precision, where the script adds it in a higher one.

As much as bf16 rounds a score between 1 and 2, which the script's own product does; a weight changes by 0.4 %.
"""

KNOWN = (torch, functional, operator, math, builtins, Tensor, torch.special, torch.linalg, torch.fft)
"""Where the functions live that change their arguments only if name or arguments say so, and no mode of torch's."""
WRITING = {
    "iadd", "iand", "iconcat", "ifloordiv", "ilshift", "imatmul", "imod", "imul", "ior", "ipow", "irshift", "isub",
    "itruediv", "ixor", "setitem", "delitem",
}  # fmt: skip
WRITING_METHODS = {f"__{name}__" for name in WRITING}

MOVES = {"transpose", "permute", "swapaxes", "swapdims", "movedim", "unsqueeze", "reshape", "flatten", "mT", "T"}
"""Right for any strides, though the result may be a view where it was a copy."""
VIEWS = {"view", "view_as", "unflatten", "squeeze"}
READERS = {"linear", "matmul", "bmm", "__matmul__"}
"""What they return depends neither on the strides nor on the memory of their first argument."""
QUESTIONS = {"size", "dim", "shape", "dtype", "device"}

Step = tuple[Any, ...]  # in the graph a bias is a Node, at run time a tensor
"""('mul', number), ('div', number), ('add', bias) or ('fill', mask, value put where it is true)"""


@dataclass
class Scores:
    """The product of queries and keys, and the steps from there to the softmax."""

    query: Node | None = None
    key: Node | None = None
    key_is_transposed: bool = True
    """True: [..., features, keys], as a product takes it; False: [..., keys, features], as in an einsum."""
    steps: list[Step] = field(default_factory=list)
    """In the script's order; the first one applies to the product itself."""
    nodes: list[Node] = field(default_factory=list)
    """Of the pattern but for its last product, from the last to the first."""


def fuse_attention(graph_module: GraphModule) -> int:
    """Replace each attention of `graph_module` in place; returns how many there were."""
    graph, replaced = graph_module.graph, 0
    for node in list(graph.nodes):
        factors = _weights_and_value(node)
        scores = _scores_below(factors[0]) if factors else None
        if not factors or not scores:
            continue
        nodes = [node, *scores.nodes]
        if not (all(_is_understood(one) for one in nodes) and reads_the_same_at_its_end(nodes)):
            continue
        steps, as_product = tuple(scores.steps), not is_only_read(node)
        with graph.inserting_before(node):
            fused = graph.call_function(
                attend, (scores.query, scores.key, factors[1], scores.key_is_transposed, steps, as_product)
            )
        fused.meta = dict(node.meta)
        node.replace_all_uses_with(fused)
        for one in nodes:  # not all dead code: torch.fx takes `mask.fill_(0)` for dead
            graph.erase_node(one)
        replaced += 1
    if replaced:
        graph_module.recompile()
    return replaced


def attend(
    query: Tensor, key: Tensor, value: Tensor, key_is_transposed: bool, steps: tuple[Step, ...], as_product: bool = True
) -> Tensor:
    """softmax(query @ key^T, put through `steps`) @ value.

    query: [..., queries, features]; value: [..., keys, value features]; key as `key_is_transposed` says.
    `as_product`: with the strides of a product's result, and free to be changed, which the kernel's own result is not.
    """
    key = key.transpose(-2, -1) if key_is_transposed else key
    if not _fits_kernel(query, key, value, steps):
        return _plain(query, key, value, steps)
    masking = _Masking.of(steps)
    if not masking.is_safe(query, key):
        return _plain(query, key, value, steps)
    mask = masking.for_kernel(query)
    result = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=masking.scale)
    if not as_product:
        return result
    return result.clone(memory_format=torch.contiguous_format) if result.requires_grad else result.contiguous()


def _fits_kernel(query: Tensor, key: Tensor, value: Tensor, steps: tuple[Step, ...]) -> bool:
    """Products and sums broadcast more than the kernel does."""
    same = query.shape[:-2] == key.shape[:-2] == value.shape[:-2] and query.dtype == key.dtype == value.dtype
    if not (same and query.dim() >= 3 and min(query.numel(), key.numel(), value.numel()) > 0):
        return False
    shape = (*query.shape[:-1], key.shape[-2])
    operands = [operand.shape for name, operand, *_ in steps if name in ("add", "fill")]
    return all(
        len(one) <= len(shape) and all(a in (1, b) for a, b in zip(reversed(one), reversed(shape), strict=False))
        for one in operands
    )


def _kernel_dtype(query: Tensor) -> torch.dtype:
    """Autocast hands the kernel a copy in its own precision."""
    kind = query.device.type
    if query.dtype == torch.float64 or not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        return query.dtype
    return torch.get_autocast_dtype(kind)


def _plain(query: Tensor, key: Tensor, value: Tensor, steps: tuple[Step, ...]) -> Tensor:
    """What the script says, step by step."""
    scores = query @ key.transpose(-2, -1)
    if scores.dtype in (torch.float16, torch.bfloat16):
        scores = scores.float()  # which a value to fill with may need
    for name, operand, *rest in steps:
        scores = scores.masked_fill(operand, *rest) if name == "fill" else getattr(torch, name)(scores, operand)
    return scores.softmax(-1).to(value.dtype) @ value


@dataclass
class _Masking:
    """The steps combined: softmax(scale * scores + bias, without the hidden scores)."""

    scale: float = 1.0
    bias: Tensor | None = None
    hidden: Tensor | None = None
    """True where a score was replaced."""
    highest: float = -math.inf
    """The largest value that replaced a score, after the steps that follow."""

    @classmethod
    def of(cls, steps: tuple[Step, ...]) -> _Masking:
        found = cls()
        for name, operand, *rest in steps:
            if name == "fill":
                found.hidden = operand if found.hidden is None else found.hidden | operand
                found.highest = max(found.highest, rest[0])
            elif name == "add":
                term = operand if operand.is_floating_point() else operand.to(torch.get_default_dtype())
                found.bias = term if found.bias is None else found.bias + term
                if found.highest > -math.inf:
                    found.highest = found.highest + float(operand.detach().max())
            else:
                factor = operand if name == "mul" else 1 / operand
                found.scale *= factor
                found.bias = None if found.bias is None else found.bias * factor
                found.highest = found.highest * factor
        return found

    @torch.no_grad()
    def is_safe(self, query: Tensor, key: Tensor) -> bool:
        """Does every query keep a key, with a bias small enough for fp32 and all hidden scores far below?"""
        if self.bias is None and self.hidden is None:
            return True
        lowest, highest = 0.0, self.highest
        if self.bias is None:
            assert self.hidden is not None
            if self.hidden.all(-1).any():
                return False
        else:
            bias = self.bias if self.hidden is None else self.bias.masked_fill(self.hidden, -math.inf)
            low, high = (float(one) for one in torch.aminmax(bias.amax(-1)))
            if not max(-low, high) <= SAFE_BIAS:  # as written, also where one is NaN
                return False
            lowest, highest = low, max(highest, _largest_rounded(bias, _kernel_dtype(query)))
        if highest == -math.inf:
            return True
        largest = [float(torch.linalg.vector_norm(one, math.inf)) for one in (query, key)]
        return bool(highest + UNDERFLOW < lowest - abs(self.scale) * query.shape[-1] * largest[0] * largest[1])

    def for_kernel(self, query: Tensor) -> Tensor | None:
        """A boolean mask, True where a key is kept, or a bias that is added to the scores."""
        mask = self.bias
        if mask is None:
            mask = None if self.hidden is None else ~self.hidden
        else:
            mask = mask.to(query.dtype)
            mask = mask if self.hidden is None else mask.masked_fill(self.hidden, -math.inf)
        return mask if mask is None or mask.dim() > 1 else mask.expand(*(1, 1)[mask.dim() :], *mask.shape)


def _largest_rounded(bias: Tensor, dtype: torch.dtype) -> float:
    """The largest of the values that `dtype` cannot hold well enough: they must be hidden, as a finite mask's are."""
    if bias.dtype == dtype:
        return -math.inf
    rounded = bias.to(dtype).to(bias.dtype)
    fits = ~((bias - rounded).abs() > ROUNDED_BIAS)  # as written: -inf, which stays itself, differs by NaN
    return float(torch.maximum(bias, rounded).masked_fill_(fits, -math.inf).max())


def _weights_and_value(node: Node) -> tuple[Node, Node] | None:
    """The factors of a product that may be the last one of attention."""
    if called(node) == "einsum":
        factors = _einsum_factors(node)
        if factors is None:
            return None
        left, right, (a, b, out) = factors
        fits = a[:-2] == b[:-2] == out[:-2] and a[-1] == b[-2] and out[-2:] == a[-2] + b[-1]
        return (left, right) if fits and a[-1] not in out else None
    if called(node) not in PRODUCTS:
        return None
    first, second = _argument(node, 0, "input"), _argument(node, 1, "other", "mat2")
    return (first, second) if isinstance(first, Node) and isinstance(second, Node) else None


def _is_understood(node: Node) -> bool:
    """Does it do what its name says: without further arguments, and a cast without taking digits before the point?"""
    if any(name not in UNDERSTOOD and given is not None for name, given in node.kwargs.items()):
        return False
    if called(node) not in CASTS:
        return True
    before, after = (one.meta.get("example_value") for one in (node.all_input_nodes[0], node))
    if not (isinstance(before, Tensor) and isinstance(after, Tensor)):
        return False
    return after.is_floating_point() and after.device == before.device


def _scores_below(node: object) -> Scores | None:
    """From `node` down to the product of the scores: through casts, a dropout that is off and a softmax over keys."""
    passed: list[Node] = []
    while isinstance(node, Node) and len(node.users) == 1:
        passed.append(node)
        name, first = called(node), _argument(node, 0, "input")
        if name == "softmax":
            scores = _scores(first) if _argument(node, 1, "dim") == -1 else None
            if scores:
                scores.nodes = [*passed, *scores.nodes]
            return scores
        off = name == "dropout" and (_argument(node, 2, "training") is False or _argument(node, 1, "p") == 0)
        if name not in CASTS and not off:
            return None
        node = first
    return None


def _scores(node: object) -> Scores | None:
    """Walk from the softmax's input up to the product; None where there is anything else in between."""
    found, factor = Scores(), 1.0
    while isinstance(node, Node) and len(node.users) == 1:
        found.nodes.append(node)
        name = called(node)
        first, second = _argument(node, 0, "input"), _argument(node, 1, "other", "mask", "mat2")
        if name in PRODUCTS or name == "einsum":
            return _with_product(found, node)
        if name in CASTS:
            pass
        elif name in ("mul", "div", "truediv", "imul", "itruediv"):
            if isinstance(first, int | float) and name == "mul":
                first, second = second, first
            if isinstance(second, bool) or not isinstance(second, int | float) or not second > 0:
                return None
            found.steps.insert(0, ("mul" if "mul" in name else "div", second))
            factor *= second if "mul" in name else 1 / second
        elif name in ("add", "iadd"):
            if name == "add" and _leads_to_product(second):  # not in `bias += scores`, which changes the bias
                first, second = second, first
            if not isinstance(second, Node) or _argument(node, 2, "alpha") not in (None, 1):
                return None
            found.steps.insert(0, ("add", second))
        elif name in ("masked_fill", "masked_fill_"):
            fill = _argument(node, 2, "value")
            if not isinstance(second, Node) or not isinstance(fill, int | float) or not fill * factor <= -1e3:
                return None  # softmax would not turn this value into 0
            found.steps.insert(0, ("fill", second, float(fill)))
        else:
            return None
        node = first
    return None


def _with_product(found: Scores, node: Node) -> Scores | None:
    if called(node) == "einsum":
        factors = _einsum_factors(node)
        if factors is None:
            return None
        found.query, found.key, (a, b, out) = factors
        found.key_is_transposed = False
        return found if a[:-2] == b[:-2] == out[:-2] and a[-1] == b[-1] and out[-2:] == a[-2] + b[-2] else None
    query, key = _argument(node, 0, "input"), _argument(node, 1, "other", "mat2")
    if not (isinstance(query, Node) and isinstance(key, Node)):
        return None
    found.query, found.key = query, key
    return found


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


def _leads_to_product(node: object) -> bool:
    """Is this the operand of a sum that the scores come from?"""
    while isinstance(node, Node) and node.args:
        name = called(node)
        if name in PRODUCTS or name == "einsum":
            return True
        if name not in CASTS | {"mul", "div", "truediv"}:
            return False
        node = node.args[0]
    return False


def _argument(node: Node, position: int, *names: str) -> object:
    """An argument given by position or by one of its names; None where it was not given."""
    if position < len(node.args):
        return node.args[position]
    return next((node.kwargs[name] for name in names if name in node.kwargs), None)


# what the statements around an attention change, and what becomes of its result


def called(node: Node) -> str:
    """The name of what a node calls, which is the same for functions, methods and operators."""
    if node.op == "call_method":
        return str(node.target)
    if node.op != "call_function":
        return ""
    return str(getattr(node.target, "__name__", ""))


def reads_the_same_at_its_end(chain: list[Node]) -> bool:
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
        changed = [] if node.target is attend else may_change(node)
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
