"""Rules that a reader of the code relies on, each read from the files."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.syntax_trees import clear_trees as clear_trees
from tests.syntax_trees import nodes

ROOT = Path(__file__).parents[1]
MOST_ANY = 100
"""Lines of the package."""
NAMELESS = {"utils", "util", "helpers", "helper", "common", "misc"}


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


ALL = sources("flatout", "tests", "examples", "benchmarks")


def at(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"


def test_every_file_says_what_it_holds() -> None:
    own = [path.relative_to(ROOT) for path in ALL if "standins" not in path.parts]  # those bear the names of others
    assert [str(path) for path in own if NAMELESS & {part.lower() for part in path.with_suffix("").parts}] == []
    assert [at(path, node) for path in sources("flatout") for node in nodes(path) if _is_wordless_module(node)] == []


def _is_wordless_module(node: ast.AST) -> bool:
    return isinstance(node, ast.Module) and bool(node.body) and ast.get_docstring(node) is None


def test_the_environment_is_read_in_one_file() -> None:
    paths = [path for path in sources("flatout") if path.name != "environment.py"]
    assert [at(path, node) for path in paths for node in nodes(path) if _touches_environment(node)] == []


def _touches_environment(node: ast.AST) -> bool:
    names = {"environ", "environb", "getenv", "getenvb"}
    if isinstance(node, ast.ImportFrom):
        return node.module == "os" and any(alias.name in names for alias in node.names)
    return isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value) in ("os", "posix")


def test_only_report_and_cli_print() -> None:
    paths = [path for path in sources("flatout") if path.relative_to(ROOT).parts[1] not in ("report", "cli")]
    assert [at(path, node) for path in paths for node in nodes(path) if _prints(node)] == []


def _prints(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"


def test_any_is_rare_and_explained() -> None:
    """By a comment on its line or where it is imported, or by the docstring of the name that it is given."""
    uses: list[str] = []
    unexplained: list[str] = []
    for path in sources("flatout"):
        lines = path.read_text().splitlines()
        explained = any(re.match(r"from typing import .*\bAny\b.*#", line) for line in lines)
        for number in sorted({node.lineno for node in nodes(path) if isinstance(node, ast.Name) and node.id == "Any"}):
            here, after = lines[number - 1], lines[number : number + 1]
            uses.append(here)
            if not (explained or "#" in here or any(one.startswith('"""') for one in after)):
                unexplained.append(f"{path.relative_to(ROOT)}:{number}: {here.strip()}")
    assert unexplained == []
    assert 0 < len(uses) <= MOST_ANY


def test_the_rules_see_what_they_forbid() -> None:
    def found(source: str) -> tuple[bool, bool]:
        tree = list(ast.walk(ast.parse(source)))
        return any(map(_touches_environment, tree)), any(map(_prints, tree))

    assert found("import os\nos.environ['A']") == (True, False)
    assert found("from os import getenv") == (True, False)
    assert found("import os\nprint(os.getenv('A'))") == (True, True)
    assert found("environment.variable('A')\nreport.print(1)") == (False, False)
