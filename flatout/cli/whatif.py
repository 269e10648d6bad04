"""flatout whatif: what a step of a script would take on GPUs that are not here."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from flatout.cli.shared_options import (
    AllowNetworkOption,
    IncludePrivateOption,
    IsolationOption,
    PatienceOption,
    TargetArgument,
)
from flatout.cli.streams import progress_line, stdin_copy
from flatout.errors import UsageError
from flatout.signals import signals_as_exits

Precision = Literal["fp32", "tf32", "bf16"]


def whatif(
    target: TargetArgument,
    device: Annotated[
        list[str] | None,
        typer.Option(
            "--device",
            metavar="GPU",
            help="A GPU of the catalogue, such as h100 or rtx-4090; can be repeated. Default: eight usual ones.",
        ),
    ] = None,
    precision: Annotated[
        Precision | None, typer.Option(help="Of the products: fp32, tf32 or bf16; default: as the script has them.")
    ] = None,
    price: Annotated[
        list[str] | None,
        typer.Option(metavar="GPU=PRICE", help="Of an hour, for the price of a million samples; can be repeated."),
    ] = None,
    patience: PatienceOption = "30m",
    isolation: IsolationOption = "auto",
    allow_network: AllowNetworkOption = False,
    include_private: IncludePrivateOption = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> int:
    """Predict what a training step would take on GPUs that are not here.

    The script runs as a trial on this machine's CPU that changes none of your files, for a few steps; its operators
    are then put at the rates that the GPU's documents promise and an H100 was measured to reach. Exit code: 0 done; 1
    the script took no step, or failed; 2 a device or a price cannot be used.
    """
    from flatout.application.whatif import WhatIfRequest, whatif_script
    from flatout.machine.visible_devices import show_only
    from flatout.report.document import document, to_text
    from flatout.script.entry import Target
    from flatout.units import parse_positive_seconds

    prices = _prices(price or [])
    script, patience_seconds = Target.from_command(target), parse_positive_seconds(patience, "--patience")
    script.check_exists()
    show_only("cpu")
    with signals_as_exits(), progress_line() as progress, stdin_copy() as stdin_file:
        request = WhatIfRequest(
            target=script,
            devices=device or None,
            precision=precision,
            prices=prices or None,
            patience_seconds=patience_seconds,
            isolation=isolation,
            allow_network=allow_network,
            stdin_file=stdin_file,
        )
        found = whatif_script(request, progress)
    payload = {"script": {"name": script.name, "arguments": list(script.arguments)}, **found.to_json()}
    saved = document("whatif", payload, include_private=include_private)
    print(to_text(saved) if json else found)
    return 0


def _prices(words: list[str]) -> dict[str, float]:
    found = {}
    for word in words:
        name, equals, number = word.partition("=")
        try:
            found[name] = float(number)
        except ValueError:
            equals = ""
        if not name or not equals:
            raise UsageError(
                f"--price {word}", limit="it is a GPU and the price of an hour", remedy="for example h100=2.49"
            )
    return found
