"""The source of a module's class: where it assigns an attribute, and what its methods do with it.

source = class_source(Net, folder)
source.assigned("layers")         # (("__init__", ("net.py", 7, "self.layers = [...]")),)
source.calls("body")              # (True,): its only use outside __init__ is self.body(...)
"""

from __future__ import annotations

import ast
import inspect
import linecache
from collections.abc import Iterator
from dataclasses import dataclass, field

from flatout.diagnose.finding import SourceLine
from flatout.infer.user_lines import is_users
from flatout.tracebacks import within

MOVES = ("to", "cuda", "cpu", "type_as")
COPIES = ("new_tensor",)
"""Methods of another tensor that copy what they are given to its device."""
NO_COMPUTATION = (
    "shape", "size", "dim", "ndim", "numel", "nelement", "dtype", "device", "requires_grad", "is_cuda", "layout",
    "tolist", "item", "numpy",
)  # fmt: skip
NUMBERS = ("len", "int", "float", "bool")
"""What these give is the same wherever the tensor is."""
_SCOPES = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, kw_only=True)
class ClassSource:
    """Of one class, without what it inherits."""

    path: str
    """Of the file, in full."""
    file: str
    """The same as it is shown."""
    tree: ast.ClassDef
    lines: tuple[str, ...] = field(repr=False)
    """Of the whole file."""

    def line(self, node: ast.stmt | ast.expr) -> SourceLine:
        text = self.lines[node.lineno - 1].strip() if node.lineno <= len(self.lines) else ""
        return self.file, node.lineno, text[:200]

    def method(self, name: str) -> ast.FunctionDef | None:
        return next((one for one in self._methods() if one.name == name), None)

    def assigned(self, attribute: str) -> tuple[tuple[str, SourceLine], ...]:
        """(method, line) of each `self.attribute = ...`, also as one of several targets."""
        return tuple(
            (method.name, self.line(node))
            for method, node, _ in self._uses(attribute)
            if isinstance(node.ctx, ast.Store | ast.Del)
        )

    def read(self, attribute: str) -> tuple[ast.AST, ...]:
        """What is around each use of `self.attribute` in methods other than __init__."""
        return tuple(
            around
            for method, node, around in self._uses(attribute)
            if isinstance(node.ctx, ast.Load) and method.name != "__init__"
        )

    def calls(self, attribute: str) -> tuple[bool, ...]:
        """For each use that `read` gives: is it `self.attribute(...)`?"""
        return tuple(
            isinstance(around, ast.Call) and _attribute_name(around.func) == attribute
            for around in self.read(attribute)
        )

    def computes_with(self, attribute: str) -> bool:
        """Does a method other than __init__ take more of it than its shape or its numbers, as `self.sizes.tolist()`?"""
        return not self._used(attribute) <= {
            one for method in self._methods() for node in ast.walk(method) for one in _plainly_read(node)
        }

    def moves(self, attribute: str) -> bool:
        """Does a method move it, or a part of it, as in `self.mask[:n].to(x.device)`?"""
        uses = self._used(attribute)
        return any(
            not uses.isdisjoint(one) for method in self._methods() for node in ast.walk(method) for one in _moved(node)
        )

    def _used(self, attribute: str) -> set[ast.expr]:
        """Reads of `self.attribute` in methods other than __init__."""
        return {
            node
            for method, node, _ in self._uses(attribute)
            if isinstance(node.ctx, ast.Load) and method.name != "__init__"
        }

    def _methods(self) -> Iterator[ast.FunctionDef]:
        yield from (one for one in self.tree.body if isinstance(one, ast.FunctionDef))

    def _uses(self, attribute: str) -> Iterator[tuple[ast.FunctionDef, ast.Attribute, ast.AST]]:
        """(method, `self.attribute`, what is around it)."""
        for method in self._methods():
            if not method.args.args:
                continue
            own = method.args.args[0].arg
            for around in ast.walk(method):
                for node in ast.iter_child_nodes(around):
                    if isinstance(node, ast.Attribute) and node.attr == attribute and _is_name(node.value, own):
                        yield method, node, around


def class_source(kind: type, folder: str) -> ClassSource | None:
    """None where it is not the user's class, or where its source is not known for certain."""
    try:
        path = inspect.getsourcefile(kind)
    except (TypeError, OSError):  # written in C, or made at run time
        return None
    if not path or not is_users(path):
        return None
    linecache.checkcache(path)
    lines = linecache.getlines(path)
    try:
        found: list[ast.AST] = [ast.parse("".join(lines))]
    except (SyntaxError, ValueError, RecursionError):
        return None
    for part in kind.__qualname__.replace(".<locals>", "").split("."):
        inner = [node for one in found for node in ast.walk(one) if node is not one and isinstance(node, _SCOPES)]
        found = [node for node in inner if node.name == part]
    trees = [one for one in found if isinstance(one, ast.ClassDef)]
    if len(trees) != 1:  # defined twice, as under an `if`
        return None
    return ClassSource(path=path, file=within(path, folder), tree=trees[0], lines=tuple(lines))


def _is_name(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _chain(node: ast.expr) -> Iterator[ast.expr]:
    """What it is taken from: of `self.mask[:n].bool()` that itself, `self.mask[:n].bool`, `self.mask[:n]`..."""
    yield node
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
        yield node


def _plainly_read(node: ast.AST) -> Iterator[ast.expr]:
    """What `node` only takes the shape or the numbers of."""
    if isinstance(node, ast.Attribute) and node.attr in NO_COMPUTATION:
        yield from _chain(node.value)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in NUMBERS:
        for one in node.args:
            yield from _chain(one)


def _moved(node: ast.AST) -> Iterator[Iterator[ast.expr]]:
    """What `node` moves: of `x.to(device)`, `torch.as_tensor(x, device=device)` and `y.new_tensor(x)` each time x."""
    if isinstance(node, ast.Attribute) and node.attr in MOVES:
        yield _chain(node.value)
    elif isinstance(node, ast.Call):
        copies = _attribute_name(node.func) in COPIES or any(one.arg == "device" for one in node.keywords)
        yield from (_chain(one) for one in (node.args if copies else ()))


def _attribute_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else ""
