"""A Python file as a syntax tree that keeps every character, and what its names stand for."""

from __future__ import annotations

import codecs
import functools
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import libcst as cst
from libcst.metadata import CodeRange, MetadataWrapper, PositionProvider, QualifiedNameSource, Scope, ScopeProvider

from flatout.errors import ScriptError, UsageError

Block = cst.IndentedBlock | cst.Module
"""What holds whole statements."""
Statement = cst.SimpleStatementLine | cst.BaseCompoundStatement
N = TypeVar("N", bound=cst.CSTNode)


@dataclass(frozen=True, kw_only=True, eq=False)
class SourceFile:
    """One file, parsed. Nodes are identified by themselves: two equal calls are two nodes."""

    path: Path
    content: bytes
    bom: bytes
    tree: cst.Module
    parents: Mapping[cst.CSTNode, cst.CSTNode]
    positions: Mapping[cst.CSTNode, CodeRange]
    scopes: Mapping[cst.CSTNode, Scope | None]

    @classmethod
    def read(cls, path: Path) -> SourceFile:
        """Raises UsageError for a file that cannot be read, ScriptError for one that is not Python."""
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}") from error
        return cls.parsed(path, content)

    @classmethod
    def parsed(cls, path: Path, content: bytes) -> SourceFile:
        bom = codecs.BOM_UTF8 if content.startswith(codecs.BOM_UTF8) else b""
        try:
            tree = cst.parse_module(content[len(bom) :])
        except (cst.ParserSyntaxError, UnicodeDecodeError, SyntaxError, LookupError, RecursionError) as error:
            first = str(error).splitlines()[0]
            raise ScriptError(f"{path} could not be parsed: {first}", limit="LibCST reads the source") from None
        if bom + tree.bytes != content:
            raise ScriptError(f"{path} could not be read without loss", limit="LibCST would write it differently")
        wrapper = MetadataWrapper(tree, unsafe_skip_copy=True)
        return cls(
            path=path,
            content=content,
            bom=bom,
            tree=tree,
            parents={child: parent for parent in walk(tree) for child in _children(parent)},
            positions=wrapper.resolve(PositionProvider),
            scopes=wrapper.resolve(ScopeProvider),
        )

    def code(self, node: cst.CSTNode) -> str:
        """The node's own text, without the comments before it."""
        return self.tree.code_for_node(node).strip()

    def lines(self, node: cst.CSTNode) -> tuple[int, int]:
        """Its first and last line, from 1."""
        where = self.positions[node]
        return where.start.line, where.end.line

    def qualified(self, node: cst.CSTNode) -> set[str]:
        """The full names that an imported name may stand for: `optim.Adam` -> {'torch.optim.Adam'}."""
        scope = self.scopes.get(node)
        if scope is None:
            return set()
        names = scope.get_qualified_names_for(node)
        return {one.name for one in names if one.source is QualifiedNameSource.IMPORT}

    def place(self, node: cst.CSTNode) -> str:
        """'train.py:12'."""
        return f"{self.path.name}:{self.lines(node)[0]}"

    def ancestors(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """From its parent to the module."""
        while (parent := self.parents.get(node)) is not None:
            yield parent
            node = parent

    def statement_of(self, node: cst.CSTNode) -> Statement | None:
        """The innermost statement that stands in a block by itself and holds `node`; None: it shares its line with the
        header of a compound statement."""
        for one in (node, *self.ancestors(node)):
            if isinstance(one, Statement):
                return one if isinstance(self.parents.get(one), Block) else None
        return None

    def function_of(self, node: cst.CSTNode) -> cst.FunctionDef | None:
        """The innermost function around it."""
        return next((one for one in self.ancestors(node) if isinstance(one, cst.FunctionDef)), None)

    def class_of(self, node: cst.CSTNode) -> cst.ClassDef | None:
        """The innermost class around it."""
        return next((one for one in self.ancestors(node) if isinstance(one, cst.ClassDef)), None)

    def find(self, kind: type[N], inside: cst.CSTNode | None = None) -> Iterator[N]:
        """Nodes of a kind, in the order of the text."""
        return (node for node in walk(inside or self.tree) if isinstance(node, kind))

    def mentions(self, *words: str) -> str:
        """The first of the words that its text has; '' if it has none."""
        return next((word for word in words if word.encode() in self.content), "")


@functools.lru_cache(maxsize=1 << 18)
def _children(node: cst.CSTNode) -> tuple[cst.CSTNode, ...]:
    """Cached: LibCST finds them by a visit of its own each time."""
    return tuple(node.children)


def walk(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """The node and everything in it, in the order of the text."""
    waiting = [node]
    while waiting:
        one = waiting.pop()
        yield one
        waiting += reversed(_children(one))


def walk_own(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """The same without what is inside functions, lambdas and classes that are defined in it."""
    waiting = list(reversed(_children(node)))
    while waiting:
        one = waiting.pop()
        yield one
        if not isinstance(one, (cst.FunctionDef, cst.ClassDef, cst.Lambda)):
            waiting += reversed(_children(one))


def dotted(node: cst.BaseExpression) -> str:
    """'self.model' for such an expression; '' for any other."""
    parts: list[str] = []
    while isinstance(node, cst.Attribute):
        parts.append(node.attr.value)
        node = node.value
    if not isinstance(node, cst.Name):
        return ""
    return ".".join([node.value, *reversed(parts)])


def keyword(call: cst.Call, name: str) -> cst.Arg | None:
    return next((one for one in call.args if one.keyword is not None and one.keyword.value == name), None)


def called(call: cst.Call) -> str:
    """The method's or function's own name: 'backward' of `loss.backward()`."""
    if isinstance(call.func, cst.Attribute):
        return call.func.attr.value
    return call.func.value if isinstance(call.func, cst.Name) else ""


def unwrapped(call: cst.BaseExpression, names: Container[str] | None = None) -> cst.BaseExpression:
    """`X` of `X.to(device).cuda()`, for the methods `names`, or all."""
    while isinstance(call, cst.Call) and isinstance(call.func, cst.Attribute):
        if names is not None and call.func.attr.value not in names:
            break
        call = call.func.value
    return call
