"""The options of verbs that run a script as a trial: how it is kept apart from the machine, and what it sees of it."""

from __future__ import annotations

from typing import Annotated

import typer

IsolationOption = Annotated[
    str,
    typer.Option(
        "--isolation",
        metavar="MODE",
        help="How trials are kept from your files: auto, overlay (copy-on-write), guard (read-only).",
    ),
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
