"""A script's own files, and their digests: itself and what it imports from its folder or from PYTHONPATH.

They are found by reading import statements, so none of the script's code runs. What a script imports in another way
(by a name computed at run time, or with `exec`) is not found.

    source_digests(target)     # ('sha256:0f3a... train.py', 'sha256:77b1... net/blocks.py')
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flatout.environment import python_path
from flatout.errors import UsageError
from flatout.script.entry import Target
from flatout.tracebacks import is_users_file

MOST_FILES = 500
"""A script that imports more of its own is not followed further."""


@dataclass(frozen=True, kw_only=True)
class OwnFile:
    """One file of a script's own code."""

    path: Path
    name: str
    """Relative to the folder in which its imports are looked up."""
    module: str
    """'' for a script that is started by its path."""

    @property
    def package(self) -> str:
        """What a relative import in it is relative to."""
        return self.module if self.path.name == "__init__.py" else self.module.rpartition(".")[0]


def own_files(target: Target) -> tuple[OwnFile, ...]:
    """The script first. Raises UsageError where a module's file is not there."""
    roots = [target.folder, *python_path()]
    found: dict[str, OwnFile] = {}
    waiting = [_first(target, roots)]
    while waiting and len(found) < MOST_FILES:
        file = waiting.pop(0)
        key = os.path.realpath(file.path)
        if key in found:
            continue
        found[key] = file
        waiting += [one for name in _imported(file) if (one := _module(name, roots)) is not None]
    return tuple(found.values())


def source_digests(target: Target) -> tuple[str, ...]:
    """'sha256:... name' for each of the script's own files that can be read; none where a module has no file."""
    digests: list[str] = []
    try:
        files = own_files(target)
    except UsageError:
        return ()
    for file in files:
        with contextlib.suppress(OSError):
            digests.append(f"{content_digest(file.path.read_bytes())} {file.name}")
    return tuple(digests)


def content_digest(content: bytes) -> str:
    """What comes before a file's name in `source_digests`."""
    return f"sha256:{hashlib.sha256(content).hexdigest()[:16]}"


def changed_since(target: Target, digests: Sequence[str]) -> list[str]:
    """Names of the script's own files that differ from what they were when `source_digests` gave these."""
    now = source_digests(target)
    return sorted({one.partition(" ")[2] for one in {*digests} ^ {*now}})


def _first(target: Target, roots: Sequence[str]) -> OwnFile:
    if target.path is not None:
        return OwnFile(path=Path(target.path), name=_printable(os.path.basename(target.path)), module="")
    module = str(target.module)
    found = _module(f"{module}.__main__", roots) or _module(module, roots)
    if found is None:
        raise UsageError(f"no file of module {module}", remedy=f"looked in {', '.join(map(str, roots))}")
    return found


def _module(name: str, roots: Sequence[str]) -> OwnFile | None:
    for root in roots:
        place = Path(root, *name.split("."))
        for path in (place / "__init__.py", place.parent / f"{place.name}.py"):
            if path.is_file() and is_users_file(os.path.abspath(path)):
                return OwnFile(path=path, name=_printable(os.path.relpath(path, root)), module=name)
    return None


def _imported(file: OwnFile) -> Iterator[str]:
    """Names of modules that its import statements may load; a name that is imported from a module may be one too."""
    try:
        tree = ast.parse(file.path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _with_packages(alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, file.package)
            yield from _with_packages(base)
            yield from (f"{base}.{alias.name}" if base else alias.name for alias in node.names)


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    above = package.split(".")
    kept = above[: len(above) - node.level + 1]
    return ".".join([*kept, *([node.module] if node.module else [])])


def _with_packages(name: str) -> Iterator[str]:
    """'a.b.c' -> 'a', 'a.b', 'a.b.c': importing it runs them all."""
    parts = name.split(".") if name else []
    yield from (".".join(parts[: count + 1]) for count in range(len(parts)))


def _printable(name: str) -> str:
    """A file name need not be Unicode; what stands in a plan is."""
    return name.encode("utf-8", "backslashreplace").decode()
