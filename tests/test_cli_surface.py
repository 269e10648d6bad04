"""The command line's surface, compared with what was recorded: no option comes, goes or changes unnoticed.

After a change that was meant, record it again and read the difference before committing:

    .venv/bin/python tests/test_cli_surface.py > tests/recorded/cli_surface.txt
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import typer

from flatout.cli import main

RECORDED = Path(__file__).parent / "recorded" / "cli_surface.txt"


def surface() -> str:
    group: Any = typer.main.get_command(main.application())
    lines = _described("flatout", group)
    for name, command in group.commands.items():
        lines += ["", *_described(f"flatout {name}", command)]
    return "\n".join(lines) + "\n"


def _described(name: str, command: Any) -> list[str]:
    options = [_option(param) for param in command.params if param.param_type_name == "option"]
    if isinstance(command, main.RunCommand):
        options = [f"  {option.name} {option.value}  {option.meaning}" for option in main._run_options()]
    arguments = [f" {param.name.upper()}" for param in command.params if param.param_type_name == "argument"]
    return [f"{name}{''.join(arguments)}: {_first_line(command.help)}", *options]


def _option(param: Any) -> str:
    kind = "" if param.is_flag else f" {param.metavar}"
    default = "" if param.default is None or param.is_flag else f" [{param.default}]"
    return f"  {'/'.join([*param.opts, *param.secondary_opts])}{kind}{default}  {_first_line(param.help)}"


def _first_line(text: str | None) -> str:
    return (text or "UNDOCUMENTED").strip().splitlines()[0]


def test_surface_is_as_recorded() -> None:
    assert surface() == RECORDED.read_text()


def test_everything_is_documented() -> None:
    assert "UNDOCUMENTED" not in surface()


def test_help_is_quick_to_start() -> None:
    """Measured in modules, which a busy machine does not change: help needs no torch, a script not even typer."""
    heavy = "{'torch', 'numpy', 'rich', 'typer'} & set(sys.modules)"
    show = f"import sys; from flatout.__main__ import main; main(sys.argv[1:]); print('MODULES', {heavy} or '')"
    done = subprocess.run([sys.executable, "-c", show, "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "MODULES {'typer'}"
    show = f"import sys; import flatout.__main__, flatout.cli.command_line; print('MODULES', {heavy} or '')"
    done = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1].strip() == "MODULES"


def test_a_run_does_not_load_what_tune_needs(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("pass")
    unused = ("flatout.tuning", "flatout.search", "flatout.script.trial.session", "flatout.machine.measured_peaks")
    show = (
        "import atexit, sys; from flatout.__main__ import main; "
        f"atexit.register(lambda: print('MODULES', [name for name in sys.modules if name.startswith({unused})])); "
        "sys.exit(main(['run', '--no-plan', 'train.py']))"
    )
    done = subprocess.run([sys.executable, "-c", show], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["MODULES []"]
    assert (tmp_path / "flatout-run.json").exists()


if __name__ == "__main__":
    sys.stdout.write(surface())
