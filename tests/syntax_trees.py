"""The syntax tree of a source file, for tests that read code. A file is parsed once per module of tests."""

from __future__ import annotations

import ast
import functools
import gc
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest


@functools.cache
def _parsed(path: Path) -> ast.Module:
    was_on = gc.isenabled()
    gc.disable()  # a tree is thousands of new objects: collecting while they are made takes three times as long as that
    try:
        return ast.parse(path.read_text())
    finally:
        if was_on:
            gc.enable()


@functools.cache
def nodes(path: Path, *, types: bool = True) -> Sequence[ast.AST]:
    """All of them. types: those under `if TYPE_CHECKING` too."""
    found: list[ast.AST] = [_parsed(path)]
    for node in found:
        if not types and isinstance(node, ast.If) and getattr(node.test, "id", None) == "TYPE_CHECKING":
            found += node.orelse
        else:
            found += ast.iter_child_nodes(node)
    return found


def root_of(node: ast.AST) -> str | None:
    """Of `a.b[0].c`, a. To write down every expression with `ast.unparse` would take seconds."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


def name_of(node: ast.expr) -> str:
    """The last name: of `a.b`, b; '' where it has none."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


@pytest.fixture(scope="module", autouse=True)
def clear_trees() -> Iterator[None]:
    """Import it where trees are read: kept, they would slow down every collection in the tests that follow."""
    yield
    _parsed.cache_clear()
    nodes.cache_clear()
