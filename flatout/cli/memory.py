"""flatout memory: what holds a script's memory, where it peaks, what leaks; speed and memory by batch size."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from flatout.cli.ended_by_signal import signals_as_exits
from flatout.cli.progress_line import progress_line
from flatout.cli.stdin_copy import stdin_copy
from flatout.cli.trial_options import AllowNetworkOption, DeviceOption, IsolationOption

if TYPE_CHECKING:
    from flatout.script.entry import Target

STEPS = 8
"""That are watched where nobody says how many."""


def memory(
    target: Annotated[list[str], typer.Argument(help="The script and its own arguments, or -m MODULE.")],
    steps: Annotated[
        int | None, typer.Option(metavar="N", help="Steps to watch, after 2 of warm-up; default: 8.")
    ] = None,
    patience: Annotated[
        str,
        typer.Option(metavar="TIME", help="End a script that has not taken its steps by then."),
    ] = "30m",
    device: DeviceOption = None,
    batch_curve: Annotated[
        bool,
        typer.Option("--batch-curve", help="Instead: speed and peak memory by batch size, and the knee."),
    ] = False,
    budget: Annotated[
        str | None, typer.Option(metavar="TIME", help="Time for --batch-curve: 5m, 300s; default: 60s.")
    ] = None,
    isolation: IsolationOption = "auto",
    allow_network: AllowNetworkOption = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> int:
    """Show what holds the memory of a script, where it peaks, and what leaks from step to step.

    The script runs as a trial that changes none of your files, and is stopped after some steps. --batch-curve changes
    the batch size of its DataLoader between steps, on a CPU; a script that makes its own batches, loads them in worker
    processes or compiles its model is refused. Exit code: 0 done; the script's own if it fails; 128 + the signal's
    number if a signal kills it; 1 if it takes too few steps within --patience.
    """
    from flatout.machine.visible_devices import show_only
    from flatout.report.document import to_text
    from flatout.report.memory_text import memory_document, memory_text
    from flatout.script.entry import Target
    from flatout.script.memory_trial import MemoryRequest, watch_memory
    from flatout.units import parse_seconds

    _check_options(steps, batch_curve, budget, isolation)
    kept = cast("Literal['auto', 'overlay', 'guard']", isolation)
    script, patience_seconds = Target.from_command(target), parse_seconds(patience)
    show_only(device)
    if batch_curve:
        return _batch_curve(script, parse_seconds(budget or "60s"), patience_seconds, kept, allow_network, json)
    request = MemoryRequest(
        target=script,
        steps=steps or STEPS,
        patience_seconds=patience_seconds,
        isolation=kept,
        allow_network=allow_network,
    )
    with signals_as_exits():
        watched = watch_memory(request)
    sys.stderr.write(watched.errors)
    if not watched.status or watched.steps:  # a script that fails at once has shown why: there is nothing to add
        print(to_text(memory_document(watched)) if json else memory_text(watched))
    return watched.status or 0


def _check_options(steps: int | None, batch_curve: bool, budget: str | None, isolation: str) -> None:
    from flatout.errors import UsageError

    if steps is not None and steps < 1:
        raise UsageError(f"--steps is {steps}", limit="it is at least 1")
    if steps is not None and batch_curve:
        raise UsageError("--steps together with --batch-curve", limit="steps are taken until --budget is spent")
    if budget is not None and not batch_curve:
        raise UsageError("--budget without --batch-curve", limit="--patience bounds a watched run")
    if isolation not in ("auto", "overlay", "guard"):
        raise UsageError(f"--isolation is {isolation!r}", limit="it is one of auto, overlay, guard")


def _batch_curve(
    script: Target,
    budget_seconds: float,
    patience_seconds: float,
    isolation: Literal["auto", "overlay", "guard"],
    allow_network: bool,
    json: bool,
) -> int:
    from flatout.arguments import as_seconds
    from flatout.report.document import document, to_text
    from flatout.sizing.script_curve import CurveRequest, script_batch_curve

    as_seconds(budget_seconds, "--budget")
    with signals_as_exits(), progress_line() as progress, stdin_copy() as stdin_file:
        request = CurveRequest(
            target=script,
            budget_seconds=budget_seconds,
            patience_seconds=patience_seconds,
            isolation=isolation,
            allow_network=allow_network,
            stdin_file=stdin_file,
        )
        curve = script_batch_curve(request, progress)
    named = {"script": {"name": script.name, "arguments": list(script.arguments)}}
    print(to_text(document("batch-curve", {**named, **curve.to_json()})) if json else curve)
    return 0
