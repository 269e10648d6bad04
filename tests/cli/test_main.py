"""The entry: exit codes, messages on stderr, and no traceback of ours."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

import flatout.cli
from flatout.__main__ import main
from flatout.cli import main as verbs
from flatout.cli.command_line import Option
from flatout.errors import ScriptError, UsageError


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put a verb's module in place of the real one."""

    def put(name: str, **contents: Any) -> None:
        module = types.ModuleType(f"flatout.cli.{name}")
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(flatout.cli, name, module, raising=False)

    return put


@pytest.fixture
def run_verb(plant: Callable[..., None]) -> list[list[str]]:
    """A run verb that notes what it was called with and exits with 7."""
    calls: list[list[str]] = []
    options = (Option(name="--plan", meaning="the plan to follow", value="FILE"),)
    plant("run", OPTIONS=options, main=lambda arguments: calls.append(list(arguments)) or 7)
    return calls


def test_run_gets_its_arguments_untouched(run_verb: list[list[str]]) -> None:
    line = ["--plan", "p.toml", "train.py", "--help", "two words", "--", "-x", ""]
    assert main(["run", *line]) == 7
    assert verbs.main(["run", *line]) == 7
    assert run_verb == [line, line]


def test_help_of_run_lists_its_options(run_verb: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("Usage: flatout run [OPTIONS] SCRIPT [ARGUMENTS]...\n")
    assert "--plan FILE  the plan to follow" in shown
    assert run_verb == []


def test_a_script_of_tune_keeps_its_arguments(plant: Callable[..., None]) -> None:
    seen: list[Any] = []

    def tune(target: Annotated[list[str], typer.Argument()], budget: float = 1.0, quick: bool = False) -> int:
        """Tune."""
        seen.append((target, budget, quick))
        return 3

    plant("tune", tune=tune)
    assert main(["tune", "--quick", "--budget", "2", "t.py", "--budget", "9", "--help", "a b", "--"]) == 3
    assert main(["tune", "-m", "a.b", "--help"]) == 3
    assert seen == [
        (["t.py", "--budget", "9", "--help", "a b", "--"], 2.0, True),
        (["-m", "a.b", "--help"], 1.0, False),
    ]


@pytest.mark.parametrize(
    ("raised", "code", "message"),
    [
        (UsageError("n is 0", limit="it must be 1", remedy="pass 1"), 2, "error: n is 0; it must be 1; pass 1\n"),
        (ScriptError("it never trains"), 1, "error: it never trains\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (BrokenPipeError(), 141, ""),
        (typer.Exit(2), 2, ""),
    ],
)
def test_what_a_verb_raises_becomes_an_exit_code(
    plant: Callable[..., None], capsys: pytest.CaptureFixture[str], raised: BaseException, code: int, message: str
) -> None:
    def check() -> None:
        """Check."""
        raise raised

    plant("check", check=check)
    assert main(["check"]) == code
    assert capsys.readouterr().err == message


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["chekc"], "error: No such command 'chekc'"),
        (["--bogus"], "error: No such option: --bogus; see: flatout --help"),
    ],
)
def test_a_wrong_command_line_is_one_line(capsys: pytest.CaptureFixture[str], line: list[str], message: str) -> None:
    assert main(line) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(message)
    assert shown.err.count("\n") == 1
    assert shown.out == ""


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"flatout {flatout.__version__}\n"
    assert main([]) == 0
    assert capsys.readouterr().out.startswith("Usage: flatout [OPTIONS] COMMAND")


def test_a_reader_that_leaves_is_no_error() -> None:
    command = [sys.executable, "-m", "flatout", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="it takes Linux's /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_is_one_line(unbuffered: str) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    for words in (["--help"], ["--version"], ["report", "--help"]):
        with open("/dev/full", "wb") as full:
            command = [sys.executable, "-m", "flatout", *words]
            found = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment)
        assert found.stderr == (
            "error: cannot write the output: No space left on device; "
            "free some space, or write to where there is some\n"
        )
        assert found.returncode == 2


@pytest.mark.skipif(sys.platform == "win32", reason="it takes a shell of Unix")
def test_closed_streams_are_no_error(tmp_path: Path) -> None:
    command = f'"{sys.executable}" -m flatout clean --dry-run'
    environment = {**os.environ, "FLATOUT_CACHE_DIR": str(tmp_path)}
    for closed in (">&-", ">&- 2>&-", "<&- >&- 2>&-"):
        assert subprocess.run(f"{command} {closed}", shell=True, env=environment).returncode == 0


def test_what_an_encoding_lacks_is_an_escape() -> None:
    program = "from flatout.__main__ import _verb; import flatout.cli.main as m; " + (
        "m.main = lambda arguments: print('x1.5 \\u00b1 0.1') or 0; _verb([])"
    )
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    found = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "x1.5 \\xb1 0.1\n")


def test_a_closed_stderr_changes_no_exit_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["compare", "missing.json", "missing.json"]) == 2
    assert main(["compare", "--zzz"]) == 2
