"""Each command that README shows names a verb, options, files and make targets that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from flatout.cli import main
from flatout.cli.command_line import split_target

ROOT = Path(__file__).parents[1]
OURS = ("tests/", "examples/", "benchmarks/", "flatout/")
"""A path under these must exist; another, such as train.py, is the reader's."""


def commands(readme: str) -> list[str]:
    """The lines after '$ ' in console blocks, continued lines joined."""
    blocks = re.findall(r"^```console\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    return re.findall(r"^\$ (.*)$", "\n".join(blocks).replace("\\\n", " "), re.MULTILINE)


def complaint(command: str) -> str:
    """What is wrong with it; '' if nothing is."""
    words = shlex.split(command, comments=True)
    for word in words:
        path = word.partition("::")[0]
        if path.startswith(OURS) and not (ROOT / path).exists():
            return f"no {path}"
    program = Path(words[0]).name
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return "".join(f"make has no {word}" for word in words[1:] if word not in targets)
    return _verb_complaint(words[1:]) if program == "flatout" else ""


def _verb_complaint(words: list[str]) -> str:
    group: Any = typer.main.get_command(main.application())
    if not words or words[0].startswith("-"):
        known = {option for param in group.params for option in param.opts} | {"--help"}
        return "".join(f"flatout has no {word}" for word in words if word not in known)
    name, *rest = words
    if name not in group.commands:
        return f"flatout has no verb {name}"
    command = group.commands[name]
    valued = [option for param in command.params if not getattr(param, "is_flag", True) for option in param.opts]
    known = {option for param in command.params for option in (*param.opts, *param.secondary_opts)} | {"--help"}
    if isinstance(command, main.RunCommand):
        valued = [option.name for option in main._run_options() if option.value]
        known |= {option.name for option in main._run_options()}
    takes_script = isinstance(command, main.ScriptCommand)
    options = split_target(rest, valued)[0] if takes_script else [word for word in rest if word.startswith("-")]
    names = [word.partition("=")[0] for word in options if word.startswith("-")]
    return "".join(f"flatout {name} has no {option}" for option in names if option not in known)


def test_readme_commands_exist() -> None:
    wrong = {command: why for command in commands((ROOT / "README.md").read_text()) if (why := complaint(command))}
    assert wrong == {}


def test_commands_are_found_in_console_blocks_only() -> None:
    readme = "$ no\n```console\n$ make demo\nits output\n$ flatout check \\\n  --json\n```\n```python\n$ no\n```\n"
    assert commands(readme) == ["make demo", "flatout check    --json"]


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("make demo test", ""),
        ("make coffee", "make has no coffee"),
        ("flatout --version", ""),
        ("flatout --verbose", "flatout has no --verbose"),
        (".venv/bin/flatout chek", "flatout has no verb chek"),
        ("python examples/absent.py", "no examples/absent.py"),
        ("python train.py", ""),
    ],
)
def test_a_planted_command_is_judged(command: str, expected: str) -> None:
    assert complaint(command) == expected


def test_the_librarys_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("flatout.sizing.fit_to_memory.TIMED_SECONDS", 0.0)  # which is the fastest does not matter here
    monkeypatch.setattr("flatout.sizing.fit_to_memory.ROUNDS", 1)
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert blocks
    names: dict[str, Any] = {}  # a later block goes on from those before
    for block in blocks:
        block = block.replace('limit="1 GiB"', 'limit="128 MiB"')  # it is filled with real steps
        exec(compile(block, "README.md", "exec"), names)
    assert list((tmp_path / "run").iterdir())
