"""The verbs, as one typer application: `flatout --help` and everything but the fast path of `flatout run`.

Importing this imports every verb's module, so those import their rooms (and torch) inside their functions:
`flatout --help` answers in the time that Python needs to start.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from flatout import __version__
from flatout.cli.command_line import Option, asks_for_help, split_target

TARGET = "SCRIPT [ARGUMENTS]..."
"""How a script and its arguments stand in the usage of a verb that runs one."""


class ScriptCommand(TyperCommand):
    """A verb that takes a script: after the script (or -m MODULE) every word is the script's, '--help' too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        valued = [name for option in self.params if not getattr(option, "is_flag", True) for name in option.opts]
        own, target = split_target(args, valued)
        return super().parse_args(ctx, [*own, "--", *target] if target else own)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return ["[OPTIONS]", TARGET]


class RunCommand(ScriptCommand):
    """`run` reads its options without typer; its help is drawn from the same table."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = ["--help"] if asks_for_help(args, _run_options()) else ["--", *args]
        return TyperCommand.parse_args(self, ctx, words)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        rows = [(f"{option.name} {option.value}".strip(), option.meaning) for option in _run_options()]
        with formatter.section("Options"):
            formatter.write_dl([*rows, ("--help", "Show this message and exit.")])


VERBS = {
    "check": TyperCommand,
    "tune": ScriptCommand,
    "run": RunCommand,
    "memory": ScriptCommand,
    "predict": TyperCommand,
    "generate": TyperCommand,
    "tune-inference": TyperCommand,
    "export": TyperCommand,
    "compare": TyperCommand,
    "clean": TyperCommand,
}
"""Every verb, in the order in which a newcomer needs them; the function of that name stands in its own file."""


def main(arguments: Sequence[str]) -> int:
    """Run the verb that the arguments name; returns its exit code. Without arguments: the help."""
    command = typer.main.get_command(application())
    try:
        with command.make_context("flatout", list(arguments) or ["--help"]) as context:
            return command.invoke(context) or 0
    except typer.Exit as ended:
        return ended.exit_code
    except typer.TyperException as error:
        at = getattr(error, "ctx", None)  # where in `flatout VERB` the slip is, if the error knows
        see = f"see: {at.command_path if at else 'flatout'} --help"
        print(f"error: {error.format_message().rstrip('.')}; {see}", file=sys.stderr)
        return error.exit_code


def application() -> typer.Typer:
    """The verbs as typer sees them."""
    app = typer.Typer(rich_markup_mode=None, add_completion=False, pretty_exceptions_enable=False)
    app.callback(help="Make PyTorch scripts faster on this machine, with proof that the numbers are still right.")(
        _options
    )
    for name, kind in VERBS.items():
        function = name.replace("-", "_")
        if importlib.util.find_spec(f"flatout.cli.{function}") is not None:
            verb = run if name == "run" else getattr(importlib.import_module(f"flatout.cli.{function}"), function)
            app.command(name, cls=kind)(verb)
    return app


def run(target: Annotated[list[str], typer.Argument(metavar="SCRIPT")]) -> int:
    """Run a script by its plan (flatout.toml); without one, run it as it is and only watch.

    Also: flatout run [OPTIONS] -m MODULE [ARGUMENTS]...
    """
    return int(importlib.import_module("flatout.cli.run").main(target))


def _run_options() -> Sequence[Option]:
    return importlib.import_module("flatout.cli.run").OPTIONS


def _version(asked: bool) -> None:
    if asked:
        print(f"flatout {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """The options before the verb."""
