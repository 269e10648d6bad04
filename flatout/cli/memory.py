"""flatout memory: what holds a script's memory, when it peaks, and what leaks."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from flatout.cli.ended_by_signal import signals_as_exits
from flatout.cli.trial_options import AllowNetworkOption, DeviceOption, IsolationOption


def memory(
    target: Annotated[list[str], typer.Argument(help="The script and its own arguments, or -m MODULE.")],
    steps: Annotated[int, typer.Option(metavar="N", help="How many steps to watch, after 2 that warm up.")] = 8,
    patience: Annotated[
        str,
        typer.Option(
            metavar="TIME", help="How long that may take: a script that never steps, or hangs, is ended then."
        ),
    ] = "30m",
    device: DeviceOption = None,
    isolation: IsolationOption = "auto",
    allow_network: AllowNetworkOption = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> int:
    """Run a script for a few steps: what holds its memory, when it peaks, what leaks from step to step.

    The script runs as a trial that changes none of your files, and is stopped after its steps. Exit code: 0 watched;
    the script's own, after its own traceback, where it fails;
    128 + the signal's number where a signal kills it; 1 where it makes too few steps within --patience.
    """
    from flatout.errors import UsageError
    from flatout.machine.visible_devices import show_only
    from flatout.report.document import to_text
    from flatout.report.memory_text import memory_document, memory_text
    from flatout.script.entry import Target
    from flatout.script.memory_trial import MemoryRequest, watch_memory
    from flatout.units import parse_seconds

    if steps < 1:
        raise UsageError(f"--steps is {steps}", limit="it is at least 1")
    if isolation not in ("auto", "overlay", "guard"):
        raise UsageError(f"--isolation is {isolation!r}", limit="it is one of auto, overlay, guard")
    request = MemoryRequest(
        target=Target.from_command(target),
        steps=steps,
        patience_seconds=parse_seconds(patience),
        isolation=isolation,  # type: ignore[arg-type]
        allow_network=allow_network,
    )
    show_only(device)
    with signals_as_exits():
        watched = watch_memory(request)
    sys.stderr.write(watched.errors)
    if not watched.status or watched.steps:  # a script that fails at once has shown why: there is nothing to add
        print(to_text(memory_document(watched)) if json else memory_text(watched))
    return watched.status or 0
