"""All files of a script, and what a name in them may stand for, through assignments, parameters and returns."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeGuard

import libcst as cst

from flatout.source_patch.edits import Edits, Insertion, NoSourceForm
from flatout.source_patch.source_file import SourceFile, called, dotted, unwrapped, walk, walk_own

CONSTANTS = ("None", "True", "False")
OF_MODULES = ("train", "eval", "forward", "to")
"""Methods of torch.nn.Module that scripts give other classes too."""
MOST_STEPS = 12
"""From a name to what it stands for."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Value:
    """An expression that a name may stand for, and where it is."""

    file: SourceFile
    node: cst.BaseExpression


@dataclass(frozen=True, kw_only=True, eq=False)
class Sources:
    """The script first."""

    files: Sequence[SourceFile]
    edits: Edits = field(default_factory=Edits)

    @classmethod
    def read(cls, paths: Sequence[Path]) -> Sources:
        return cls(files=[SourceFile.read(path) for path in paths])

    @property
    def script(self) -> SourceFile:
        return self.files[0]

    def calls(self) -> Iterator[tuple[SourceFile, cst.Call]]:
        """Every call, file by file."""
        for file in self.files:
            for call in file.find(cst.Call):
                yield file, call

    def mentions(self, *words: str) -> str:
        """The first word that any file has; '' if none."""
        return next((word for file in self.files if (word := file.mentions(*words))), "")

    def functions(self, name: str) -> list[tuple[SourceFile, cst.FunctionDef]]:
        return [(file, one) for file in self.files for one in file.find(cst.FunctionDef) if one.name.value == name]

    def classes(self, name: str) -> list[tuple[SourceFile, cst.ClassDef]]:
        return [(file, one) for file in self.files for one in file.find(cst.ClassDef) if one.name.value == name]

    def callers(self, file: SourceFile, function: cst.FunctionDef) -> list[tuple[SourceFile, cst.Call]]:
        """Calls of a function by its name, and of a class for its `__init__`."""
        owner, name = file.class_of(function), function.name.value
        if name == "__init__" and owner is not None:
            name, owner = owner.name.value, None
        found = [(place, call) for place, call in self.calls() if called(call) == name]
        if owner is None:  # by its name, or as an attribute of its module
            return [one for one in found if isinstance(one[1].func, cst.Name) or one[0].qualified(one[1].func)]
        if name in OF_MODULES:  # `model.train()` is none of a class with a method of that name
            found = [one for one in found if not isinstance(one[1].func, cst.Attribute) or one[1].args]
        return [one for one in found if isinstance(one[1].func, cst.Attribute)]

    def values(self, file: SourceFile, node: cst.BaseExpression, depth: int = MOST_STEPS) -> list[Value] | None:
        """Every expression that `node` may stand for; None if that cannot be read from the source."""
        if depth == 0:
            return None
        if isinstance(node, (cst.Name, cst.Attribute)) and dotted(node):
            if file.qualified(node) or dotted(node) in CONSTANTS:
                return [Value(file=file, node=node)]
            return self._of_name(file, node, depth)
        if isinstance(node, cst.Call) and isinstance(node.func, cst.Name):
            found, imported = self.functions(node.func.value), file.qualified(node.func)
            if len(found) == 1 and not any(name.startswith("torch.") for name in imported):
                ((place, function),) = found
                results = returned(function)
                return _together(self.values(place, one, depth - 1) for one in results) if results else None
        return [Value(file=file, node=node)]

    def _of_name(self, file: SourceFile, node: cst.BaseExpression, depth: int) -> list[Value] | None:
        name = dotted(node)
        if any(name in [item.name.value for item in one.names] for one in file.find(cst.Global)):
            return None  # bound by functions too
        for scope in self._scopes(file, node):
            bound = list(_bindings(scope, name))
            if bound or has_parameter(scope, name):
                given = (self._arguments(file, one, name, depth) for one in [scope] if has_parameter(one, name))
                values = (self._bound(file, value, index, name, depth) for value, index in bound)
                return _together(itertools.chain(given, values))
        return None

    def _scopes(self, file: SourceFile, node: cst.CSTNode) -> list[cst.CSTNode]:
        """Where a name may be bound, innermost first; of `self.x` it is the class."""
        if isinstance(node, cst.Attribute) and dotted(node).startswith("self."):
            owner = file.class_of(node)
            return [] if owner is None else [owner]
        functions = [one for one in file.ancestors(node) if isinstance(one, cst.FunctionDef)]
        return [*functions, file.tree]

    def _bound(
        self, file: SourceFile, value: cst.BaseExpression | None, index: int | None, name: str, depth: int
    ) -> list[Value] | None:
        if value is None:
            return None
        if index is None:
            if isinstance(value, cst.Call) and dotted(unwrapped(value)) == name:  # model = model.to(device)
                return []
            return self.values(file, value, depth - 1)
        if isinstance(value, (cst.Tuple, cst.List)):
            return self.values(file, value.elements[index].value, depth - 1) if index < len(value.elements) else None
        made = self.values(file, value, depth - 1)
        if made is None or not all(isinstance(one.node, cst.Tuple) for one in made):
            return None
        return _together(
            self.values(one.file, one.node.elements[index].value, depth - 1) if index < len(one.node.elements) else None
            for one in made
            if isinstance(one.node, cst.Tuple)
        )

    def _arguments(self, file: SourceFile, function: cst.FunctionDef, name: str, depth: int) -> list[Value] | None:
        """What callers pass for a parameter."""
        calls = self.callers(file, function)
        if not calls or (len(self.functions(function.name.value)) > 1 and function.name.value != "__init__"):
            return None
        is_method = file.class_of(function) is not None
        given = ((place, argument_of(call, function, name, is_method=is_method)) for place, call in calls)
        return _together(None if one is None else self.values(place, one.value, depth - 1) for place, one in given)

    def torch_name(self, file: SourceFile, choice: str) -> str:
        """What torch is called in a file; it is imported where it is not yet."""
        for statement in file.tree.body:
            if name := _binds_torch(file, statement):
                return name
        where, code = last_import(file), "import torch\n"
        if not any(isinstance(one, Insertion) and one.node is where and one.code == code for one in self.edits.made):
            self.edits.add(Insertion(file=file, node=where, choice=choice, code=code, after=True))
        return "torch"

    def where_torch_is(self, file: SourceFile) -> cst.BaseStatement | cst.SimpleStatementLine:
        """The statement after which torch has the name that `torch_name` returns: the last of the imports at the top of
        a file, or a later one that binds it."""
        body: list[cst.BaseStatement | cst.SimpleStatementLine] = list(file.tree.body)
        last = last_import(file)
        binding = next((one for one in body if _binds_torch(file, one)), last)
        return max(last, binding, key=lambda one: body.index(one))

    def fresh_name(self, file: SourceFile, wanted: str) -> str:
        """A name that the file does not use."""
        name, number = wanted, 1
        while file.mentions(name):
            number += 1
            name = f"{wanted}_{number}"
        return name


def _together(each: Iterable[list[Value] | None]) -> list[Value] | None:
    """All of them; None as soon as one is not known."""
    found: list[Value] = []
    for values in each:
        if values is None:
            return None
        found += values
    return found


def _binds_torch(file: SourceFile, statement: cst.CSTNode) -> str:
    """The name that torch has after this statement at the top of a file; '' where it binds none."""
    for node in file.find(cst.ImportAlias, statement):
        if not isinstance(file.parents[node], cst.Import) or file.function_of(node) is not None:
            continue
        if dotted(node.name) == "torch":
            return node.evaluated_alias or "torch"
        if _is_torchs(dotted(node.name)) and node.asname is None:
            return "torch"  # `import torch.nn` binds torch
    return ""


def argument_of(call: cst.Call, function: cst.FunctionDef, name: str, *, is_method: bool) -> cst.Arg | None:
    """The argument that a call gives for the parameter `name`."""
    if any(one.star for one in call.args):
        return None
    for one in call.args:
        if one.keyword is not None and one.keyword.value == name:
            return one
    names = [one.name.value for one in (*function.params.posonly_params, *function.params.params)]
    if is_method and names[:1] in (["self"], ["cls"]):
        names = names[1:]
    positional = [one for one in call.args if one.keyword is None]
    place = names.index(name) if name in names else len(positional)
    return positional[place] if place < len(positional) else None


def last_import(file: SourceFile) -> cst.BaseStatement | cst.SimpleStatementLine:
    """The last of the imports that stand together at the top of a file, from the first of torch's on where there is
    one: after it, torch is there. Raises NoSourceForm for a file without any statement."""
    body = list(file.tree.body)
    imports = [place for place, one in enumerate(body) if _imports(one)]
    torch = [place for place in imports if any(_is_torchs(name) for name in _imported_names(body[place]))]
    if not imports:
        raise NoSourceForm(f"{file.path.name} imports nothing, so there is no place after the import of torch")
    place = (torch or imports)[0]
    while place + 1 < len(body) and _imports(body[place + 1]):
        place += 1
    return body[place]


def _imports(statement: cst.CSTNode) -> bool:
    return isinstance(statement, cst.SimpleStatementLine) and all(
        isinstance(one, (cst.Import, cst.ImportFrom)) for one in statement.body
    )


def _imported_names(statement: cst.CSTNode) -> list[str]:
    names: list[str] = []
    for one in statement.body if isinstance(statement, cst.SimpleStatementLine) else ():
        if isinstance(one, cst.Import):
            names += [dotted(alias.name) for alias in one.names]
        elif isinstance(one, cst.ImportFrom) and one.module is not None:
            names.append(dotted(one.module))
    return names


def _is_torchs(name: str) -> bool:
    return name.partition(".")[0] == "torch"


def returned(function: cst.FunctionDef) -> list[cst.BaseExpression]:
    return [one.value for one in walk_own(function.body) if isinstance(one, cst.Return) and one.value is not None]


def has_parameter(scope: cst.CSTNode | None, name: str) -> TypeGuard[cst.FunctionDef]:
    """Is it a function with a parameter of this name?"""
    if not isinstance(scope, cst.FunctionDef):
        return False
    parameters = (*scope.params.posonly_params, *scope.params.params, *scope.params.kwonly_params)
    return any(one.name.value == name for one in parameters)


def _bindings(scope: cst.CSTNode, name: str) -> Iterator[tuple[cst.BaseExpression | None, int | None]]:
    """(value, place in that value) of each assignment to `name`; value None: it is bound in another way. In a class
    also those inside functions, as attributes of `self` are set in methods."""
    inside = scope.body if isinstance(scope, cst.FunctionDef) else scope
    for node in walk(inside) if isinstance(scope, cst.ClassDef) else walk_own(inside):
        if isinstance(node, cst.Assign):
            for target in node.targets:
                yield from ((node.value, place) for place in _places(target.target, name))
        elif isinstance(node, (cst.AnnAssign, cst.NamedExpr)):
            if node.value is not None:
                yield from ((node.value, place) for place in _places(node.target, name))
        elif isinstance(node, (cst.For, cst.CompFor)):
            yield from ((None, None) for _ in _places(node.target, name))
        elif isinstance(node, cst.AsName):
            yield from ((None, None) for _ in _places(node.name, name))


def binds(inside: cst.CSTNode, name: str) -> bool:
    """Is `name` assigned to in there, outside of functions that are defined in it?"""
    return any(True for _ in _bindings(inside, name))


def _places(target: cst.BaseExpression, name: str) -> Iterator[int | None]:
    if dotted(target) == name:
        yield None
    elif isinstance(target, (cst.Tuple, cst.List)):
        yield from (place for place, one in enumerate(target.elements) if dotted(one.value) == name)
