"""Edits of a file, collected on its unchanged tree and made all at once.

Each edit names the choice of the plan that asks for it, and a node of the original tree. Edits of one node, and of
nodes inside one another, add up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import libcst as cst

from flatout.source_patch.source_file import SourceFile, Statement, keyword

Changed = Callable[[cst.CSTNode], cst.CSTNode]


class NoSourceForm(Exception):
    """A choice cannot be written into this source; its text says why."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Edit:
    """One change of a file, made for a choice."""

    file: SourceFile
    node: cst.CSTNode
    choice: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Replacement(Edit):
    """The node is replaced by `change(node)`, which gets it with the edits inside it made already."""

    change: Changed


@dataclass(frozen=True, kw_only=True, eq=False)
class Insertion(Edit):
    """Statements before or after the statement `node`."""

    code: str
    after: bool = False
    blank_lines: int = 0
    """Between these statements and `node`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class InContext(Edit):
    """The statements from `node` to `last`, of one block, inside `with context:`."""

    last: Statement
    context: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Hoisting(Edit):
    """The call `node` is made before its statement, inside `with context:`, and its result given the name `name`;
    `use` stands in its place."""

    statement: Statement
    context: str
    name: str
    use: str


@dataclass
class Edits:
    """What the choices so far ask for."""

    made: list[Edit] = field(default_factory=list)

    def add(self, edit: Edit) -> None:
        self.made.append(edit)

    def add_keyword(self, file: SourceFile, call: cst.Call, choice: str, **values: str) -> None:
        """Give a call these keyword arguments, or other values for those it has."""

        def change(node: cst.CSTNode) -> cst.CSTNode:
            assert isinstance(node, cst.Call)
            for name, value in values.items():
                node = with_keyword(node, name, value)
            return node

        self.add(Replacement(file=file, node=call, choice=choice, change=change))

    def insert(self, file: SourceFile, node: cst.CSTNode, choice: str, code: str, *, blank_lines: int = 0) -> None:
        """Statements before the statement `node`."""
        self.add(Insertion(file=file, node=node, choice=choice, code=code, blank_lines=blank_lines))

    def insert_after(self, file: SourceFile, node: cst.CSTNode, choice: str, code: str) -> None:
        """Statements after the statement `node`; the first of them after an empty line."""
        known = [edit for edit in self.made if isinstance(edit, Insertion) and edit.node is node and edit.after]
        apart = 0 if any(edit.blank_lines for edit in known) else 1
        self.add(Insertion(file=file, node=node, choice=choice, code=code, after=True, blank_lines=apart))

    def applied(self, file: SourceFile) -> bytes:
        """The file's new content."""
        mine = [edit for edit in self.made if edit.file is file]
        tree = file.tree.visit(_Applied(file.tree, mine))
        assert isinstance(tree, cst.Module)
        return file.bom + tree.bytes


class _Applied(cst.CSTTransformer):
    def __init__(self, tree: cst.Module, edits: Sequence[Edit]) -> None:
        super().__init__()
        self._config = tree.config_for_parsing
        self._replaced: dict[cst.CSTNode, list[Changed]] = {}
        self._inserted: dict[cst.CSTNode, list[Insertion]] = {}
        self._wrapped: dict[cst.CSTNode, InContext] = {}
        self._hoisted: dict[cst.CSTNode, Hoisting] = {}
        self._calls: dict[Hoisting, cst.BaseExpression] = {}
        """Those that were hoisted, with the edits inside them made."""
        for edit in edits:
            if isinstance(edit, Replacement):
                self._replaced.setdefault(edit.node, []).append(edit.change)
            elif isinstance(edit, Insertion):
                self._inserted.setdefault(edit.node, []).append(edit)
            elif isinstance(edit, InContext):
                self._wrapped[edit.node] = edit
            elif isinstance(edit, Hoisting):
                self._hoisted[edit.node] = edit

    def on_leave(self, original_node: cst.CSTNodeT, updated_node: cst.CSTNodeT) -> cst.CSTNodeT:
        node: cst.CSTNode = updated_node
        for change in self._replaced.get(original_node, ()):
            node = change(node)
        if (hoisting := self._hoisted.get(original_node)) is not None:
            assert isinstance(node, cst.BaseExpression)
            self._calls[hoisting] = node
            return cst.parse_expression(hoisting.use)  # type: ignore[return-value]
        if isinstance(original_node, (cst.IndentedBlock, cst.Module)):
            assert isinstance(node, (cst.IndentedBlock, cst.Module))
            node = node.with_changes(body=self._body(original_node.body, node.body))
        return node  # type: ignore[return-value]

    def _body(self, before: Sequence[cst.CSTNode], now: Sequence[cst.CSTNode]) -> list[cst.CSTNode]:
        body: list[cst.CSTNode] = []
        pairs = iter(zip(before, now, strict=True))
        for original, updated in pairs:
            one, last = updated, original
            if (wrapped := self._wrapped.get(original)) is not None:
                inside = [updated]
                while last is not wrapped.last:
                    last, updated = next(pairs)
                    inside.append(updated)
                one = _in_context(wrapped.context, inside)
            parts = dict.fromkeys((original, last))
            ahead, behind = self._around([edit for part in parts for edit in self._inserted.get(part, ())])
            ahead += [self._call(edit) for edit in self._calls if edit.statement in parts]
            if ahead:
                ahead[0], one = _above(ahead[0], one, blank_lines=self._blank_lines(parts))
            body += [*ahead, one, *behind]
        return body

    def _around(self, edits: Sequence[Insertion]) -> tuple[list[cst.CSTNode], list[cst.CSTNode]]:
        """What is inserted before a statement, and after it."""
        ahead: list[cst.CSTNode] = []
        behind: list[cst.CSTNode] = []
        for edit in edits:
            parts = list(cst.parse_module(self._laid_out(edit.code), config=self._config).body)
            if edit.after and edit.blank_lines:
                parts[0] = parts[0].with_changes(leading_lines=[cst.EmptyLine(indent=False)] * edit.blank_lines)
            (behind if edit.after else ahead).extend(parts)
        return ahead, behind

    def _laid_out(self, code: str) -> str:
        """With the file's own indentation and line ends."""
        indent, newline = str(self._config.default_indent), str(self._config.default_newline)
        lines: list[str] = []
        for line in code.splitlines():
            bare = line.lstrip(" ")
            lines.append(indent * ((len(line) - len(bare)) // 4) + bare)
        return newline.join([*lines, ""])

    def _blank_lines(self, statements: Iterable[cst.CSTNode]) -> int:
        inserted = [edit for one in statements for edit in self._inserted.get(one, ()) if not edit.after]
        return max((edit.blank_lines for edit in inserted), default=0)

    def _call(self, edit: Hoisting) -> cst.With:
        assigned = cst.Assign(targets=[cst.AssignTarget(cst.Name(edit.name))], value=self._calls[edit])
        return _in_context(edit.context, [cst.SimpleStatementLine(body=[assigned])])


def _in_context(context: str, statements: Sequence[cst.CSTNode]) -> cst.With:
    """The comments and empty lines above the first statement stay above."""
    first, *others = statements
    assert isinstance(first, (cst.SimpleStatementLine, cst.BaseCompoundStatement))
    lines = first.leading_lines
    body = [one for one in (first.with_changes(leading_lines=()), *others) if isinstance(one, cst.BaseStatement)]
    assert len(body) == len(statements)
    return cst.With(
        items=[cst.WithItem(cst.parse_expression(context))], body=cst.IndentedBlock(body=body), leading_lines=lines
    )


def _above(inserted: cst.CSTNode, statement: cst.CSTNode, *, blank_lines: int) -> tuple[cst.CSTNode, cst.CSTNode]:
    """Empty lines and comments above a statement are above what is inserted before it; where the two are to be apart,
    its comments stay with it."""
    lines = list(getattr(statement, "leading_lines", ()))
    if not blank_lines:
        return inserted.with_changes(leading_lines=lines), statement.with_changes(leading_lines=())
    empty = 0
    while empty < len(lines) and lines[empty].comment is None:
        empty += 1
    apart = [cst.EmptyLine(indent=False)] * blank_lines
    return (
        inserted.with_changes(leading_lines=lines[:empty]),
        statement.with_changes(leading_lines=[*apart, *lines[empty:]]),
    )


def with_keyword(call: cst.Call, name: str, value: str) -> cst.Call:
    """The call with this keyword argument last, laid out as the others are; one that it has gets another value."""
    given, expression = keyword(call, name), cst.parse_expression(value)
    if given is not None:
        return call.with_deep_changes(given, value=expression)
    equal = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    added = cst.Arg(keyword=cst.Name(name), value=expression, equal=equal)
    if not call.args:
        return call.with_changes(args=[added])
    *most, last = call.args
    if isinstance(last.value, cst.GeneratorExp) and not last.value.lpar:  # alone it needs no parentheses of its own
        last = last.with_deep_changes(last.value, lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    between = cst.SimpleWhitespace(" ")
    space = most[-1].comma.whitespace_after if most and isinstance(most[-1].comma, cst.Comma) else between
    if isinstance(last.comma, cst.Comma):  # a trailing one, whose whitespace ends the list
        if not most and not isinstance(last.comma.whitespace_after, cst.SimpleWhitespace):
            space = call.whitespace_before_args
        space, end = _comment_kept(space, last.comma.whitespace_after)
        added = added.with_changes(comma=last.comma.with_changes(whitespace_after=end))
        last = last.with_changes(comma=last.comma.with_changes(whitespace_after=space))
    else:
        space, end = _comment_kept(space, last.whitespace_after_arg)
        added = added.with_changes(whitespace_after_arg=end)
        last = last.with_changes(comma=cst.Comma(whitespace_after=space), whitespace_after_arg=cst.SimpleWhitespace(""))
    return call.with_changes(args=[*most, last, added])


def _comment_kept(
    between: cst.BaseParenthesizableWhitespace, end: cst.BaseParenthesizableWhitespace
) -> tuple[cst.BaseParenthesizableWhitespace, cst.BaseParenthesizableWhitespace]:
    """(whitespace after the argument that was last, whitespace before the parenthesis): a comment stays on its line."""
    if not isinstance(between, cst.ParenthesizedWhitespace) or not isinstance(end, cst.ParenthesizedWhitespace):
        return between, end
    if end.first_line.comment is None:
        return between, end
    return between.with_changes(first_line=end.first_line), end.with_changes(first_line=between.first_line)
