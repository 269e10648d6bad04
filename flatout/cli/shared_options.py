"""Options and arguments that several verbs have, and what is made of their values."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flatout.errors import UsageError
from flatout.whole_files import write_obstacle

if TYPE_CHECKING:
    from flatout.plan import Plan
    from flatout.plan_choices import ChoiceValue

TargetArgument = Annotated[
    list[str], typer.Argument(metavar="SCRIPT", help="The script and its own arguments, or -m MODULE.")
]
Isolation = Literal["auto", "overlay", "guard"]
IsolationOption = Annotated[
    Isolation,
    typer.Option(
        "--isolation", help="How trials are kept from your files: overlay (copy-on-write), guard (read-only)."
    ),
]
ExactnessOption = Annotated[
    Literal["bit-identical", "rounding", "reduced"],
    typer.Option(help="What may change in the numbers: nothing, rounding, or precision (16 bits or fewer)."),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device", metavar="NAME", help="Use only this device: cuda:1 (numbered as by flatout check) or cpu."
    ),
]
IncludePrivateOption = Annotated[
    bool,
    typer.Option("--include-private", help="Include the script's arguments, and paths in full, in what is written."),
]
AllowNetworkOption = Annotated[
    bool, typer.Option("--allow-network", help="Let trials use the network; by default they have only loopback.")
]
PatienceOption = Annotated[str, typer.Option(metavar="TIME", help="End a script that has not taken its steps by then.")]


def plan_with(path: Path | None, **choices: ChoiceValue | None) -> Plan:
    """The plan in the file (an empty one without a file), with each choice that is not None replaced."""
    from flatout.plan import Plan, read_plan

    plan = read_plan(path) if path is not None else Plan()
    for name, value in choices.items():
        if value is not None:
            plan = plan.with_choice(name, value, "asked for on the command line")
    return plan


def check_place(out: Path) -> None:
    """UsageError for a file that cannot be written there: minutes of work must not end in that."""
    if why := write_obstacle(out):
        raise UsageError(why, limit="results are written to a file", remedy="name another with --out")


def files_of_models(*names: str | None) -> list[Path]:
    """Of models and tokenizers that are named file.py:name."""
    return [Path(name.rpartition(":")[0]) for name in names if name is not None and ":" in name]
