"""Every benchmark that is a command still imports what it names, and explains itself."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]

HELP = """
import runpy, sys
for name in sys.argv[1:]:
    sys.argv = [name, "--help"]
    try:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code:
            raise
"""


def commands() -> list[str]:
    """Modules with a `main` that reads arguments, as they are given to `python -m`."""
    found = []
    for path in sorted((PROJECT / "benchmarks").rglob("*.py")):
        functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
        reads = any("ArgumentParser(" in ast.unparse(node) for node in functions)
        if reads and "main" in [node.name for node in functions]:
            found.append(".".join(path.relative_to(PROJECT).with_suffix("").parts).removesuffix(".__main__"))
    return found


@pytest.mark.slow
def test_every_benchmark_shows_its_help() -> None:
    names = commands()
    assert {"benchmarks.gain", "benchmarks.search.budget", "benchmarks.memory.forecast"} <= {*names}
    done = subprocess.run(
        [sys.executable, "-c", HELP, *names], capture_output=True, text=True, cwd=PROJECT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: ") == len(names)
