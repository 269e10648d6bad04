"""What verbs that run a script have in common: the script, how its trials are kept apart from the machine, and what
they see of it."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

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
    bool,
    typer.Option("--allow-network", help="Let trials use the network; by default they have only loopback."),
]
