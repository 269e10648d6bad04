"""The verbs, as one typer application: `flatout --help` and everything but the fast path of `flatout run`.

Importing this imports every verb's module, so those import their rooms (and torch) inside their functions:
`flatout --help` answers in the time that Python needs to start.
"""

from __future__ import annotations

import errno
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any  # Any: click's arguments, handed on

import typer
from typer.core import TyperArgument, TyperCommand

from flatout import __version__, environment
from flatout.cli.command_line import Option, asks_for_help, split_target
from flatout.cli.shared_options import TargetArgument
from flatout.errors import UsageError
from flatout.terminal import discard, tell

if TYPE_CHECKING:
    from typer._click.core import Context
    from typer._click.formatting import HelpFormatter

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What the system says where a disk, a quota or a file's largest size is used up."""

TARGET = "SCRIPT [ARGUMENTS]..."
"""How a script and its arguments stand in the usage of a verb that runs one."""


class Verb(TyperCommand):
    """Its epilog is a list of commands, shown as they are typed; the help names no Python types."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for argument in self.params:
            if isinstance(argument, TyperArgument):
                vars(argument)["display_type"] = lambda ctx: ""

    def format_epilog(self, ctx: Context, formatter: HelpFormatter) -> None:
        with formatter.section("Examples"):
            for line in str(self.epilog).split("\n"):
                formatter.write(f"{'':{formatter.current_indent}}{line}\n")


class ScriptCommand(Verb):
    """A verb that takes a script: after the script (or -m MODULE) every word is the script's, '--help' too."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        valued = [name for option in self.params if not getattr(option, "is_flag", True) for name in option.opts]
        own, target = split_target(args, valued)
        return super().parse_args(ctx, [*own, "--", *target] if target else own)

    def collect_usage_pieces(self, ctx: Context) -> list[str]:
        return ["[OPTIONS]", TARGET]


class RunCommand(ScriptCommand):
    """`run` reads its options without typer, which knows them for the help and for completion alone."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        words = ["--help"] if asks_for_help(args, _run_options()) else ["--", *args]
        return Verb.parse_args(self, ctx, words)


VERBS = {
    "check": Verb,
    "tune": ScriptCommand,
    "run": RunCommand,
    "diff": ScriptCommand,
    "profile": ScriptCommand,
    "launch": ScriptCommand,
    "watch": Verb,
    "memory": ScriptCommand,
    "whatif": ScriptCommand,
    "predict": Verb,
    "generate": Verb,
    "tune-inference": Verb,
    "export": Verb,
    "kernel": Verb,
    "bench": Verb,
    "compare": Verb,
    "report": Verb,
    "clean": Verb,
}
"""Every verb, in the order in which a newcomer needs them; the function of that name stands in its own file."""


EXAMPLES = {
    "check": """flatout check
flatout check --measure
flatout check --install pip
flatout check net.py:make""",
    "tune": """flatout tune train.py --epochs 3
flatout tune --budget 90s --exactness rounding train.py
flatout tune --fit 12GiB -m package.train
flatout tune --devices 2 train.py
flatout tune --devices 4 train.py:make""",
    "run": """flatout run train.py --epochs 3
flatout run --without compile,threads train.py
flatout run --no-plan --report baseline.json train.py
flatout run --serve train.py
flatout run --devices 2 train.py
torchrun --nproc-per-node 2 -m flatout run train.py""",
    "diff": """flatout diff train.py
flatout diff --out train.patch train.py
flatout diff --plan other.toml -m package.train""",
    "profile": """flatout profile train.py --epochs 3
flatout profile --by shape --sort flops train.py
flatout profile --trace trace.json.gz --operators operators.csv train.py""",
    "launch": """flatout launch train.py --epochs 3
flatout launch --nproc-per-node 4 --max-restarts 3 train.py
flatout launch --nnodes 2 --rendezvous node0:29500 --interface eth0 train.py
flatout launch --nproc-per-node 4 --check
flatout launch --nnodes 2 --nproc-per-node 8 --manifest slurm train.py""",
    "watch": """flatout watch
flatout watch 4242
flatout watch --json 4242""",
    "memory": """flatout memory train.py
flatout memory --batch-curve --budget 5m train.py""",
    "whatif": """flatout whatif train.py
flatout whatif --device h100 --device rtx-4090 --precision bf16 train.py
flatout whatif --device h100 --price h100=2.49 train.py --batch-size 64""",
    "predict": """flatout predict net.py:make images.npz --out results.jsonl
flatout predict ./bert questions.jsonl --plan serving.toml --out results""",
    "generate": """flatout generate ./gpt2 --prompt "Once upon" --max-new-tokens 50
flatout generate ./gpt2 --prompts prompts.jsonl --out texts.jsonl""",
    "tune-inference": """flatout tune-inference net.py:make images.npz --out serving.toml""",
    "export": """flatout export net.py:make --input 'float32[1,3,224,224]' --format pt2,onnx""",
    "bench": """flatout bench --quick
flatout bench --only resnet50,gpt2-generation --out table.json
flatout bench claims --out claims.json
flatout bench show table.json claims.json""",
    "kernel": """flatout kernel check rms_norm.py
flatout kernel check kernels.py:RMSNorm --device cpu --quick""",
    "compare": """flatout compare baseline.json candidate.json
flatout compare baseline/ candidate/ --fail-if slower --threshold 3%""",
    "report": """flatout report flatout-report.json flatout-run.json
flatout report flatout-report.json memory.json --out train.html --open""",
    "clean": """flatout clean --dry-run""",
}
"""Verb -> commands that its help shows."""


def main(arguments: Sequence[str]) -> int:
    """Run the verb that the arguments name; returns its exit code. Without arguments: the help. Raises UsageError where
    a disk is full, that of the output too."""
    try:
        code = _run_verb(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where an error of it can still be told
        return code
    except OSError as error:
        if error.errno not in FULL:
            raise
        _drop_output()
        what = "the output" if error.filename is None else error.filename
        remedy = "free some space, or write to where there is some"
        raise UsageError(f"cannot write {what}: {error.strerror}", remedy=remedy) from error


def _drop_output() -> None:
    """Where stdout still has what it could not write, Python would fail once more at its end."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        discard(sys.stdout)


def _run_verb(arguments: Sequence[str]) -> int:
    command = typer.main.get_command(application())
    if environment.completes_for_shell():
        return int(command.main(prog_name="flatout", standalone_mode=False) or 0)
    try:
        with command.make_context("flatout", list(arguments) or ["--help"]) as context:
            return command.invoke(context) or 0
    except typer.Exit as ended:
        return ended.exit_code
    except typer.Abort:  # Ctrl-C, or the end of the input, at a question
        raise KeyboardInterrupt from None
    except typer.TyperException as error:
        at = getattr(error, "ctx", None)  # where in `flatout VERB` the slip is, if the error knows
        see = f"see: {at.command_path if at else 'flatout'} --help"
        what = " ".join(error.format_message().split()).rstrip(".").replace("Value error, ", "")
        tell(f"error: {what}; {see}")
        return error.exit_code


def application() -> typer.Typer:
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    app.callback(help="Make PyTorch scripts faster on this machine, with proof that the numbers are still right.")(
        _options
    )
    for name, kind in VERBS.items():
        function = name.replace("-", "_")
        module = importlib.import_module(f"flatout.cli.{function}")
        verb = _with_run_options(run) if name == "run" else getattr(module, function)
        app.command(name, cls=kind, epilog=EXAMPLES[name])(verb)
    return app


def run(target: TargetArgument) -> int:
    """Run a script with its plan (flatout.toml); without one, run it as it is and only watch.

    On a terminal, status lines are shown while it runs and a summary at its end. Where its output goes to a file or a
    pipe, neither is: the report (flatout-run.json) has all of it. Exit code: the script's own; with --prove 0 equal,
    1 different, 4 not comparable; with --check-deterministic 0 bit-identical, 1 not.
    """
    return int(importlib.import_module("flatout.cli.run").main(target))


def _with_run_options(verb: Callable[..., int]) -> Callable[..., int]:
    """`run` with a parameter for each option of its table."""

    @functools.wraps(verb)
    def described(**options: Any) -> int:  # Any: typer gives each option its type
        return verb(options["target"])

    own = inspect.signature(verb, eval_str=True)
    table = [
        inspect.Parameter(
            one.name.removeprefix("--").replace("-", "_"),
            inspect.Parameter.KEYWORD_ONLY,
            default=None if one.value else False,
            annotation=Annotated[
                str | None if one.value else bool, typer.Option(one.name, metavar=one.value or None, help=one.meaning)
            ],
        )
        for one in _run_options()
    ]
    parameters = [own.parameters["target"], *table]
    vars(described)["__signature__"] = own.replace(parameters=parameters)
    described.__annotations__ = {one.name: one.annotation for one in parameters} | {"return": int}
    return described


def _run_options() -> Sequence[Option]:
    found: Sequence[Option] = importlib.import_module("flatout.cli.run").OPTIONS
    return found


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
