"""What a script does right after a backward pass, read from its source.

Whether anything between `backward()` and `step()` looks at gradients or weights cannot be learned by watching calls: it
may happen once in a thousand steps. The source shows it where

    loss.backward()
    optimizer.step()

directly follow one another, and no exception handler around them could continue after half a backward pass.
"""

from __future__ import annotations

import ast
import functools
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING

from flatout.tracebacks import installed_package, is_users_file

if TYPE_CHECKING:
    from torch.optim import Optimizer

_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep
HARMLESS = ("KeyboardInterrupt", "SystemExit", "GeneratorExit")
"""Exceptions that no backward pass raises by itself; signals are deferred until it is over."""

Names = tuple[str, ...]
"""A dotted name in parts: ('self', 'optimizer')."""


@dataclass(frozen=True, kw_only=True)
class Site:
    """A statement `loss.backward()` and what follows it in the same block."""

    steps: tuple[Names, ...] = ()
    """The objects whose `step()` is called next, one statement after the other."""
    zeroed: tuple[Names, ...] = ()
    """The objects whose `zero_grad()` is called directly after that."""
    obstacle: str = ""
    """Why this is no such statement; '' where at least one step follows."""


@dataclass(frozen=True, kw_only=True)
class FoundSite:
    """A Site with the live objects in place of names."""

    optimizers: tuple[Optimizer, ...] = ()
    zeroed: tuple[object, ...] = ()
    obstacle: str = ""


def after_backward(frame: FrameType | None) -> FoundSite:
    """The site of the script's `backward` call that `frame` runs inside of."""
    return _found(frame, ("/torch/_tensor.py", "/torch/autograd/__init__.py"), "backward")


def before_step(frame: FrameType | None) -> FoundSite:
    """The site of the backward pass before the script's optimizer `step` that `frame` runs inside of."""
    return _found(frame, ("/torch/optim/optimizer.py", "/torch/optim/lr_scheduler.py"), "step")


def _found(frame: FrameType | None, files: tuple[str, ...], method: str) -> FoundSite:
    while frame is not None and not frame.f_code.co_filename.endswith(files):
        frame = frame.f_back
    while frame is not None and ((file := frame.f_code.co_filename).endswith(files) or file.startswith(_PACKAGE)):
        frame = frame.f_back
    if frame is None:
        return FoundSite(obstacle="the call was not made from Python code")
    site = _site(frame.f_code, frame.f_code.co_filename, frame.f_lasti, method)
    if site.obstacle:
        return FoundSite(obstacle=site.obstacle)
    caught = _caught(frame)
    if caught:
        return FoundSite(obstacle=caught)
    return _resolved(frame, site)


def _resolved(frame: FrameType, site: Site) -> FoundSite:
    import torch

    optimizers = []
    for path in site.steps:
        one = _object(frame, path)
        if not isinstance(one, torch.optim.Optimizer):
            break
        optimizers.append(one)
    if not optimizers:
        return FoundSite(obstacle=f"{'.'.join(site.steps[0])}.step() follows backward(), but it is not an optimizer")
    zeroed = [one for path in site.zeroed if (one := _object(frame, path)) is not None]
    return FoundSite(optimizers=tuple(optimizers), zeroed=tuple(zeroed))


def _object(frame: FrameType, path: Names) -> object:
    """The object of that name, without running any of the script's code; None where that would be needed."""
    found: object = frame.f_locals.get(path[0], frame.f_globals.get(path[0]))
    for name in path[1:]:
        found = getattr(found, "__dict__", {}).get(name)
    return found


def _caught(frame: FrameType) -> str:
    """Where an exception from the backward pass would be handled, so that the script could continue after half of it;
    '' where nothing handles it up to the script's top level."""
    at: FrameType | None = frame
    while at is not None:
        caught = _handler(at.f_code, at.f_code.co_filename, at.f_lasti)
        if caught:
            return caught
        if at.f_code.co_name == "<module>" and at.f_globals.get("__name__") == "__main__":
            return ""
        at = at.f_back
    return "it does not run in the script's own thread"


@functools.lru_cache(maxsize=1024)
def _site(code: CodeType, file: str, instruction: int, method: str) -> Site:
    """file: that of the code; code objects of different files may compare equal."""
    where, place, tree = _named(file), _place(code, instruction), _tree(code)
    if tree is None or place is None:
        return Site(obstacle=f"the source of {where} cannot be read, or is not what runs")
    where = f"{where}:{place[0]}"
    for block in _blocks(tree):
        for index, statement in enumerate(block):
            if _call(statement, method) is not None and _range(statement) == place:
                return _site_in(block, index, where) if method == "backward" else _site_before(block, index, where)
    return Site(obstacle=f"{where}: {method}() is not a statement of its own")


def _named(file: str) -> str:
    """'train.py'; of a library, which the user would look for in vain among the script's files, 'click's core.py'."""
    if is_users_file(file) or file.startswith("<"):
        return Path(file).name
    return f"{installed_package(file) or 'Python'}'s {Path(file).name}"


def _site_before(block: Sequence[ast.stmt], index: int, where: str) -> Site:
    while index > 0 and _call(block[index], "step") is not None:
        index -= 1
    if _call(block[index], "backward") is None:
        if _call(block[index], "step") is not None:
            return Site(obstacle=f"{where}: the optimizer's step comes first in its block, not backward()")
        return Site(obstacle=f"{where}: {_short(block[index])} comes before the optimizer's step, not backward()")
    return _site_in(block, index, where)


def _site_in(block: Sequence[ast.stmt], index: int, where: str) -> Site:
    steps, zeroed, at = [], [], index + 1
    while at < len(block) and (path := _call(block[at], "step")) is not None:
        steps.append(path)
        at += 1
    while at < len(block) and (path := _call(block[at], "zero_grad")) is not None:
        zeroed.append(path)
        at += 1
    if not steps:
        next_one = _short(block[index + 1]) if index + 1 < len(block) else "the end of its block"
        return Site(obstacle=f"{where}: backward() is followed by {next_one}, not by the optimizer's step()")
    return Site(steps=tuple(steps), zeroed=tuple(zeroed))


def _call(statement: ast.stmt, method: str) -> Names | None:
    """The parts of `a.b` in the statement `a.b.method()`; None for any other statement.

    `backward` may be called on any expression, with arguments: for it the parts are ().
    """
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return None
    call = statement.value
    if not isinstance(call.func, ast.Attribute) or call.func.attr != method:
        return None
    if method == "backward":
        return ()
    path = tuple(ast.unparse(call.func.value).split("."))
    return None if call.args or call.keywords or not all(map(str.isidentifier, path)) else path


@functools.lru_cache(maxsize=1024)
def _handler(code: CodeType, file: str, instruction: int) -> str:
    where, place, tree = _named(file), _place(code, instruction), _tree(code)
    if tree is None or place is None:
        return f"the source of {where} cannot be read, or is not what runs"
    for node in ast.walk(tree):
        if isinstance(node, ast.Try | ast.TryStar):
            handled = not all(_is_harmless(one.type) for one in node.handlers) and _holds(node.body, place)
            if handled or (node.finalbody and _holds([*node.body, *node.handlers, *node.orelse], place)):
                return f"{where}:{node.lineno}: what a backward pass raises is handled there"
        elif isinstance(node, ast.With | ast.AsyncWith) and _holds(node.body, place):
            suppresses = any("suppress" in ast.unparse(item.context_expr) for item in node.items)
            if suppresses:
                return f"{where}:{node.lineno}: what a backward pass raises is suppressed there"
    return ""


def _is_harmless(kind: ast.expr | None) -> bool:
    kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return all(isinstance(one, ast.Name) and one.id in HARMLESS for one in kinds)


Place = tuple[int, int, int, int]
"""First line, its column, last line, its column (in bytes)."""


def _range(statement: ast.stmt) -> Place:
    value = statement.value if isinstance(statement, ast.Expr) else statement
    return value.lineno, value.col_offset, value.end_lineno or 0, value.end_col_offset or 0


def _holds(block: Sequence[ast.stmt | ast.ExceptHandler], place: Place) -> bool:
    first, last = block[0], block[-1]
    begins, ends = (first.lineno, first.col_offset), (last.end_lineno or 0, last.end_col_offset or 0)
    return begins <= place[:2] and place[2:] <= ends


def _place(code: CodeType, instruction: int) -> Place | None:
    first, last, column, end = next(itertools.islice(code.co_positions(), instruction // 2, None))
    if first is None or last is None or column is None or end is None:
        return None
    return first, column, last, end


def _tree(code: CodeType) -> ast.Module | None:
    """The syntax tree of the code's file, if the file still holds the code that runs."""
    try:
        written = os.stat(code.co_filename).st_mtime_ns
    except OSError:
        return None
    tree, codes = _file(code.co_filename, written)
    return tree if code in codes else None


@functools.lru_cache(maxsize=64)
def _file(name: str, written: int) -> tuple[ast.Module | None, frozenset[CodeType]]:
    try:
        source = Path(name).read_bytes()
        return ast.parse(source), frozenset(_codes(compile(source, name, "exec", dont_inherit=True)))
    except (OSError, SyntaxError, ValueError):
        return None, frozenset()


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _codes(one)


def _blocks(tree: ast.Module) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                yield block


def _short(statement: ast.stmt) -> str:
    line = ast.unparse(statement).splitlines()[0]
    return f"`{line if len(line) <= 60 else line[:57] + '...'}`"
