"""The options of verbs that run a script as a trial: how it is kept apart from the machine, and what it sees of it."""

from __future__ import annotations

from typing import Annotated

import typer

IsolationOption = Annotated[
    str,
    typer.Option(
        "--isolation",
        metavar="MODE",
        help="How your files are kept from the script: auto, overlay (copy-on-write), guard (read-only).",
    ),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device", metavar="NAME", help="The one GPU to be seen, as cuda:1 (numbers: flatout check), or cpu: none."
    ),
]
AllowNetworkOption = Annotated[
    bool,
    typer.Option(
        "--allow-network", help="Let the script use the network; by default it has only a loopback interface."
    ),
]
