"""The options of verbs that run a script as a trial: how it is kept apart from the machine, and what it sees of it."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

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
