"""From a holder's name to the lines of a script that make it grow or shrink; from the source alone.

>>> lines_of("for x in data:\\n    seen.append(x)\\n", "seen")
HoldingLines(grows=(2,), shrinks=(), renews=())
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeGuard

# fmt: off
_GROWS = frozenset((
    "append", "appendleft", "extend", "extendleft", "insert", "add", "update", "setdefault", "push", "put",
    "put_nowait", "store", "record", "add_", "add_param_group", "register_forward_hook", "register_forward_pre_hook",
    "register_full_backward_hook", "register_hook", "register_buffer", "register_parameter", "add_module",
))
# fmt: on
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_SHRINKS = frozenset(("pop", "popleft", "popitem", "remove", "discard", "get_nowait"))
_GROWS_FIRST_ARGUMENT = frozenset(("heappush", "insort", "insort_left", "insort_right", "setattr"))
_SHRINKS_FIRST_ARGUMENT = frozenset(("heappop", "heapreplace", "heappushpop", "delattr"))


@dataclass(frozen=True)
class HoldingLines:
    """Line numbers, the best matches first."""

    grows: tuple[int, ...]
    shrinks: tuple[int, ...]
    renews: tuple[int, ...] = ()
    """Where it is made anew or emptied outside the loop in which it grows, but not once for all: in each epoch."""


@dataclass(frozen=True, kw_only=True)
class Scope:
    """Where a name counts: in the function whose code begins at a line, or everywhere (0)."""

    first_line: int = 0


def lines_of(source: str, name: str, scope: Scope | None = None) -> HoldingLines:
    """Lines that touch the variable or the attribute `name`."""
    tree: ast.AST = ast.parse(source)
    whole = tree
    if scope is not None and scope.first_line:
        tree = _function_at(tree, scope.first_line) or tree
    guarded = {id(inner) for node in ast.walk(tree) if isinstance(node, ast.If) for inner in ast.walk(node)}
    ranked: list[tuple[int, int]] = []
    shrinks: list[int] = []
    for node in ast.walk(tree):
        rank = _growing(node, name)
        if rank is not None:
            ranked.append((rank, getattr(node, "lineno", 0)))
        if _shrinking(node, name) or (id(node) in guarded and _emptying(node, name)):
            shrinks.append(getattr(node, "lineno", 0))
    best = min((rank for rank, _ in ranked), default=0)
    lines = sorted({line for rank, line in ranked if rank == best})
    renews = set() if best == _ASSIGNED else set(_renewing_lines(whole, tree, name))
    return HoldingLines(tuple(lines), tuple(sorted(set(shrinks))), tuple(sorted(renews)))


def _renewing_lines(whole: ast.AST, tree: ast.AST, name: str) -> Iterator[int]:
    """In a loop around the one in which `name` grows, or in a function that a loop calls."""
    loops = [node for node in ast.walk(tree) if isinstance(node, _LOOPS)]
    for loop in loops:
        inner = [one for one in ast.walk(loop) if one is not loop and isinstance(one, _LOOPS)]
        growing = [one for one in inner if any(_growing(node, name) in _SURELY for node in ast.walk(one))]
        inside = {id(node) for one in growing for node in ast.walk(one)}
        if growing:
            yield from (node.lineno for node in ast.walk(loop) if id(node) not in inside and _renewing(node, name))
    called = {_called(node) for loop in ast.walk(whole) if isinstance(loop, _LOOPS) for node in ast.walk(loop)}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and function.name in called - {"", "__init__"}:
            inside = {id(node) for loop in loops for node in ast.walk(loop)}
            outside = [node for node in ast.walk(function) if id(node) not in inside]
            # without a scope, a variable of that name that a function assigns is another one
            yield from (node.lineno for node in outside if _renewing(node, name, attribute=tree is whole))


def _renewing(node: ast.AST, name: str, *, attribute: bool = False) -> TypeGuard[ast.Assign | ast.Call]:
    """attribute: only of an object."""
    if isinstance(node, ast.Assign):
        made = [one for one in _targets(node) if _is(one, name) and (not attribute or isinstance(one, ast.Attribute))]
        return bool(made) and _growing(node, name) == _ASSIGNED
    return _emptying(node, name)


def _called(node: ast.AST) -> str:
    function = node.func if isinstance(node, ast.Call) else None
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def refers_to_itself(source: str, line: int, name: str) -> bool:
    """Does the assignment at `line` make `name` from itself: `seen = cat([seen, x])`, `total += x`?"""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign | ast.AugAssign) and node.lineno <= line <= (node.end_lineno or node.lineno):
            return _growing(node, name) == _OF_ITSELF
    return False


_CERTAIN, _OF_ITSELF, _ASSIGNED = 0, 1, 2
_SURELY = (_CERTAIN, _OF_ITSELF)


def _growing(node: ast.AST, name: str) -> int | None:
    """How well a node fits as the place where `name` grows; None: not at all."""
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute) and node.func.attr in _GROWS and _names(node.func.value, name):
            return _CERTAIN
        function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if function in _GROWS_FIRST_ARGUMENT and node.args and _names(node.args[0], name):
            return _CERTAIN
    if isinstance(node, ast.AugAssign) and _names(node.target, name):
        return _OF_ITSELF
    if isinstance(node, ast.Assign):
        for target in _targets(node):
            if isinstance(target, ast.Subscript) and _names(target.value, name):
                return _CERTAIN
            if _names(target, name):
                return _OF_ITSELF if any(_names(part, name) for part in ast.walk(node.value)) else _ASSIGNED
    return None


def _shrinking(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.Call):
        function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if isinstance(node.func, ast.Attribute) and function in _SHRINKS and _names(node.func.value, name):
            return True
        return function in _SHRINKS_FIRST_ARGUMENT and bool(node.args) and _names(node.args[0], name)
    if isinstance(node, ast.Delete):
        return any(isinstance(target, ast.Subscript) and _names(target.value, name) for target in node.targets)
    if isinstance(node, ast.Assign):
        sliced = any(
            isinstance(part, ast.Subscript) and isinstance(part.slice, ast.Slice) and _names(part.value, name)
            for part in ast.walk(node.value)
        )
        return sliced and any(_names(target, name) for target in _targets(node))
    return False


def _emptying(node: ast.AST, name: str) -> bool:
    """As one that shrinks it, it counts only under an `if`, as where a buffer is full: a method that might empty it
    bounds nothing."""
    emptied = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "clear"
    return emptied and _names(node.func.value, name)  # type: ignore[attr-defined]


def _targets(node: ast.Assign) -> Iterator[ast.expr]:
    for target in node.targets:
        yield from target.elts if isinstance(target, ast.Tuple | ast.List) else (target,)


def _names(node: ast.AST, name: str) -> bool:
    """Is that the variable, the attribute, or something inside it (`log["loss"]`)?"""
    while isinstance(node, ast.Subscript):
        node = node.value
    return _is(node, name)


def _is(node: ast.AST, name: str) -> bool:
    """Is that the variable or the attribute itself?"""
    return (isinstance(node, ast.Name) and node.id == name) or (isinstance(node, ast.Attribute) and node.attr == name)


def _function_at(tree: ast.AST, first_line: int) -> ast.AST | None:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            decorators = [one.lineno for one in getattr(node, "decorator_list", ())]
            if min([node.lineno, *decorators]) == first_line:
                return node
    return None


def hook_lines(source: str) -> HoldingLines:
    """Where hooks are registered: the dict that keeps them is torch's own, and has no name in a script."""
    grows = {
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.endswith("_hook")
    }
    return HoldingLines(tuple(sorted(grows)), ())
