"""The tree is the argument: a room imports only from rooms above it, and its modules have no cycles.

Read from the syntax tree, so an import inside a function or under TYPE_CHECKING counts like any other.
"""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.syntax_trees import clear_trees as clear_trees
from tests.syntax_trees import name_of, nodes

PACKAGE = Path(__file__).parents[1] / "flatout"

# fmt: off
ROOMS = [
    "errors", "decoding", "torch_private", "whole_files", "file_locks", "temporary_folders", "units",
    "terminal", "notebook_tables", "signals", "descendants", "tracebacks", "replaced", "generators",
    "parameters", "buffers", "tensor_bytes", "statistics", "sequential", "timing", "flops", "operator_bytes",
    "environment", "evaluation_mode", "machine", "plan_document", "plan_choices", "private_details", "plan",
    "arguments", "precision", "kernels", "memory", "data", "models", "levers", "parallel", "search", "checkpoint",
    "train", "infer", "profiling", "script", "diagnose", "tuning", "sizing", "strategies", "predicted_time",
    "source_patch", "bench", "report", "serve", "application", "cli",
]
# fmt: on
"""From the top, which imports nothing of ours, to the bottom, which may import it all."""

OUTSIDE = ("flatout", "flatout.__main__")
"""The public names and the entry stand below the rooms; no room imports them, but for the version."""


def modules(package: Path) -> dict[str, Path]:
    """Module name -> file; a folder's name is that of its __init__.py."""
    names = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def imports(name: str, path: Path, known: dict[str, Path], *, types: bool = True) -> Iterator[str]:
    """Our modules that this one imports; a name that is no module stands for the module that holds it.

    types: those under `if TYPE_CHECKING` too."""
    for node in nodes(path, types=types):
        for target in _targets(node, name, is_package=path.name == "__init__.py"):
            if target == "flatout.__version__" or not f"{target}.".startswith("flatout."):
                continue
            yield target if target in known else target.rpartition(".")[0]


def _targets(node: ast.AST, name: str, is_package: bool) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            above = name.split(".")[: -node.level + is_package or None]
            base = ".".join([*above, *([base] if base else [])])
        return [f"{base}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and name_of(node.func).endswith(("import_module", "__import__")) and node.args:
        return [str(node.args[0].value)] if isinstance(node.args[0], ast.Constant) else []
    return []


def wrong_directions(package: Path) -> list[str]:
    known = modules(package)
    wrong = []
    for name, path in known.items():
        if name in OUTSIDE:
            continue
        room = name.split(".")[1]
        if room not in ROOMS:
            wrong.append(f"{name}: {room} is not in ROOMS (and in the layout of CONTRIBUTING.md)")
            continue
        for target in imports(name, path, known):
            if target in OUTSIDE:
                wrong.append(f"{name} imports {target}; name the room instead")
            elif ROOMS.index(target.split(".")[1]) > ROOMS.index(room):
                wrong.append(f"{name} imports {target}, which is below it")
    return wrong


def first_cycle(package: Path) -> list[str]:
    known = modules(package)
    graph = {name: set(imports(name, path, known, types=False)) - {name} for name, path in known.items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_rooms_import_only_from_rooms_above() -> None:
    assert wrong_directions(PACKAGE) == []


def test_the_layout_in_contributing_names_every_room_in_this_order() -> None:
    layout = (PACKAGE.parent / "CONTRIBUTING.md").read_text().partition("flatout/\n")[2].partition("tests/ ")[0]
    heads = [re.split(r"\s{2,}", line.strip())[0] for line in layout.splitlines()]
    named = [name for head in heads for name in re.split(r", |\.py|/", head) if name]
    assert named == [room for room in ROOMS if (PACKAGE / room).is_dir() or (PACKAGE / f"{room}.py").exists()]


def test_no_import_cycles() -> None:
    assert first_cycle(PACKAGE) == []


@pytest.mark.parametrize(
    ("file", "source", "complaint"),
    [
        ("units.py", "import flatout.plan", "flatout.units imports flatout.plan, which is below it"),
        ("units.py", "from flatout import plan", "flatout.units imports flatout.plan, which is below it"),
        (
            "units.py",
            "def f():\n from flatout.plan import Plan",
            "flatout.units imports flatout.plan, which is below it",
        ),
        ("machine/a.py", "from ..plan import Plan", "flatout.machine.a imports flatout.plan, which is below it"),
        ("machine/__init__.py", "from .. import plan", "flatout.machine imports flatout.plan, which is below it"),
        ("units.py", "import_module('flatout.plan')", "flatout.units imports flatout.plan, which is below it"),
        ("plan.py", "from flatout import Plan", "flatout.plan imports flatout; name the room instead"),
        (
            "helpers.py",
            "",
            "flatout.helpers: helpers is not in ROOMS (and in the layout of CONTRIBUTING.md)",
        ),
        ("cli/a.py", "from flatout import __version__\nimport os, torch\nfrom flatout.plan import Plan", None),
    ],
)
def test_a_planted_import_is_judged(tmp_path: Path, file: str, source: str, complaint: str | None) -> None:
    package = plant(tmp_path, {"plan.py": "", "machine/__init__.py": "", "cli/__init__.py": "", file: source})
    assert wrong_directions(package) == ([complaint] if complaint else [])


def test_a_planted_cycle_is_found(tmp_path: Path) -> None:
    files = {"machine/__init__.py": "", "machine/a.py": "from . import b", "machine/b.py": "from .a import x"}
    assert set(first_cycle(plant(tmp_path, files))) == {"flatout.machine.a", "flatout.machine.b"}


def plant(folder: Path, files: dict[str, str]) -> Path:
    for name, source in {"__init__.py": "", **files}.items():
        path = folder / "flatout" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return folder / "flatout"
