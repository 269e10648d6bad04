"""Which layer of torch.nn a class of the script computes by itself, from the syntax tree of its forward.

    layer_of_torch(class_definition)    # 'LayerNorm'; '' where none is recognised

Only what torch's layer computes too is named, so anything else that a forward does leaves it without a name.
"""

from __future__ import annotations

import ast
from collections.abc import Set as AbstractSet

from flatout.script.scheduler_source import last_part

_COMPUTING = {
    "conv1d", "conv2d", "conv3d", "linear", "matmul", "mm", "bmm", "baddbmm", "einsum", "embedding", "softmax",
}  # fmt: skip
"""What no layer calls that is a norm, an activation or dropout alone."""
_BATCH_NORMS: dict[tuple[int, ...], str] = {
    (0,): "BatchNorm1d",
    (0, 2): "BatchNorm1d",
    (0, 2, 3): "BatchNorm2d",
    (0, 2, 3, 4): "BatchNorm3d",
}
"""By the dimensions over which they take means."""


def layer_of_torch(kind: ast.ClassDef) -> str:
    """The layer of torch.nn that the forward of this class computes; '' where none is recognised."""
    forward = next((one for one in kind.body if isinstance(one, ast.FunctionDef) and one.name == "forward"), None)
    if forward is None or "Module" not in {last_part(one) for one in kind.bases}:
        return ""
    attributes = {node.attr for node in ast.walk(forward) if isinstance(node, ast.Attribute)}
    names = attributes | {node.id for node in ast.walk(forward) if isinstance(node, ast.Name)}
    numbers = {node.value for node in ast.walk(forward) if isinstance(node, ast.Constant)}
    submodules = {last_part(node.func) for one in kind.body for node in ast.walk(one) if isinstance(node, ast.Call)}
    if submodules & {"Linear", "Conv1d", "Conv2d", "Conv3d", "Embedding"} and "Parameter" not in submodules:
        return _cell_of_torch(forward, submodules)
    length = sum(1 for node in ast.walk(forward) if isinstance(node, ast.stmt))
    if length > 12 or names & _COMPUTING or any(isinstance(node, ast.MatMult) for node in ast.walk(forward)):
        return ""
    if 0.044715 in numbers and "tanh" in names:
        return "GELU(approximate='tanh')"
    if "Parameter" in submodules:
        return _norm_of_torch(forward, attributes, numbers)
    if length <= 2 and _is_silu(forward):
        return "SiLU"
    if "training" in attributes and length <= 8 and _is_dropout(forward, names):
        return "Dropout"
    if "erf" in names and length <= 3 and _multiplies_its_input(forward):
        return "GELU"
    return ""


def _norm_of_torch(forward: ast.FunctionDef, attributes: set[str], numbers: AbstractSet[object]) -> str:
    """Of a forward with weights. Over which dimensions it takes means says which norm it is."""
    squares = "square" in attributes or "pow" in attributes or 2 in numbers
    roots = bool(attributes & {"sqrt", "rsqrt"}) or 0.5 in numbers or -0.5 in numbers
    subtracts = any(isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) for node in ast.walk(forward))
    centred = bool(attributes & {"mean", "var_mean", "std_mean"}) and subtracts
    deviates = bool(attributes & {"var", "std", "var_mean", "std_mean"})
    scaled = deviates or ("mean" in attributes and squares and roots)
    dimensions = _averaged_over(forward)
    if not scaled or len(dimensions) != 1:
        return ""
    (over,) = dimensions
    if over == (-1,):
        return "LayerNorm" if centred else ("" if deviates else "RMSNorm")
    return _BATCH_NORMS.get(over, "") if over is not None and centred and "training" in attributes else ""


def _averaged_over(forward: ast.FunctionDef) -> set[tuple[int, ...] | None]:
    """The dimensions of each mean and variance; None: they are no constants."""
    found: set[tuple[int, ...] | None] = set()
    for node in ast.walk(forward):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr not in ("mean", "var", "std", "var_mean", "std_mean"):
            continue
        of_torch = last_part(node.func.value) == "torch"
        given = [one.value for one in node.keywords if one.arg in ("dim", "axis")] or node.args[of_torch:][:1]
        found.add(_constant_dimensions(given[0]) if given else ())
    return found


def _constant_dimensions(node: ast.expr) -> tuple[int, ...] | None:
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError):
        return None
    each = tuple(value) if isinstance(value, list | tuple) else (value,)
    return each if all(isinstance(one, int) for one in each) else None


def _cell_of_torch(forward: ast.FunctionDef, submodules: set[str]) -> str:
    """A recurrent layer, written as a loop over time."""
    called = [last_part(node.func) for node in ast.walk(forward) if isinstance(node, ast.Call)]
    loops = [node for node in ast.walk(forward) if isinstance(node, ast.For | ast.While)]
    sigmoids, tanhs = called.count("sigmoid"), called.count("tanh")
    if not loops or "Linear" not in submodules:
        return ""
    if sigmoids == 3 and tanhs == 2:
        return "LSTM"
    return "GRU" if sigmoids == 2 and tanhs == 1 else ""


def _returned(forward: ast.FunctionDef) -> ast.expr | None:
    return next((node.value for node in ast.walk(forward) if isinstance(node, ast.Return)), None)


def _factors(node: ast.expr | None) -> list[ast.expr]:
    """Of a product, without what it is divided by."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return [*_factors(node.left), *_factors(node.right)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return _factors(node.left)
    return [] if node is None else [node]


def _is_silu(forward: ast.FunctionDef) -> bool:
    """Does it return `x * sigmoid(x)`? With another factor in the sigmoid it is another function, or a gate."""
    factors = _factors(_returned(forward))
    gates = [one for one in factors if isinstance(one, ast.Call) and last_part(one.func) == "sigmoid"]
    if len(factors) != 2 or len(gates) != 1:
        return False
    (gate,) = gates
    of = gate.args[0] if gate.args else getattr(gate.func, "value", gate)
    other = factors[0] if factors[1] is gate else factors[1]
    return ast.dump(of) == ast.dump(other)


def _multiplies_its_input(forward: ast.FunctionDef) -> bool:
    inputs = {one.arg for one in forward.args.args[1:]}
    return any(isinstance(one, ast.Name) and one.id in inputs for one in _factors(_returned(forward)))


def _is_dropout(forward: ast.FunctionDef, names: set[str]) -> bool:
    """Does it draw for each element whether it stays? Noise is no choice, and stochastic depth draws one a sample."""
    calls = [node for node in ast.walk(forward) if isinstance(node, ast.Call)]
    by_element = names & {"rand_like", "empty_like", "full_like", "ones_like"} or any(
        len(call.args) == 1 and _is_whole_shape(call.args[0])
        for call in calls
        if last_part(call.func) in ("rand", "empty", "new_empty", "full", "ones")
    )
    compared = [inner for node in ast.walk(forward) if isinstance(node, ast.Compare) for inner in ast.walk(node)]
    drawn = [last_part(one.func) for one in compared if isinstance(one, ast.Call)]
    chosen = names & {"bernoulli", "bernoulli_"} or any(name in ("rand", "rand_like") for name in drawn)
    return bool(by_element and chosen)


def _is_whole_shape(node: ast.expr) -> bool:
    """Is it `x.shape`, `*x.shape` or `x.size()`?"""
    inner = node.value if isinstance(node, ast.Starred) else node
    if isinstance(inner, ast.Call):
        return not inner.args and isinstance(inner.func, ast.Attribute) and inner.func.attr == "size"
    return isinstance(inner, ast.Attribute) and inner.attr == "shape"
