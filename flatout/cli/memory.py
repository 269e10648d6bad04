"""flatout memory: what holds a script's memory, where it peaks, what leaks; speed and memory by batch size."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from flatout.cli.shared_options import (
    AllowNetworkOption,
    DeviceOption,
    IncludePrivateOption,
    IsolationOption,
    PatienceOption,
    TargetArgument,
)
from flatout.cli.streams import progress_line, stdin_copy
from flatout.errors import UsageError
from flatout.report.document import document, to_text
from flatout.signals import signals_as_exits
from flatout.terminal import tell

if TYPE_CHECKING:
    from flatout.sizing.script_curve import CurveRequest

STEPS = 8
"""Watched by default."""


def memory(
    target: TargetArgument,
    steps: Annotated[
        int | None, typer.Option(metavar="N", help="Steps to watch, after 2 of warm-up; default: 8.")
    ] = None,
    patience: PatienceOption = "30m",
    device: DeviceOption = None,
    batch_curve: Annotated[
        bool, typer.Option("--batch-curve", help="Instead: speed and peak memory by batch size, and the knee.")
    ] = False,
    budget: Annotated[
        str | None, typer.Option(metavar="TIME", help="Time for --batch-curve: 5m, 300s; default: 60s.")
    ] = None,
    isolation: IsolationOption = "auto",
    allow_network: AllowNetworkOption = False,
    include_private: IncludePrivateOption = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> int:
    """Show what holds the memory of a script, where it peaks, and what leaks from step to step.

    The script runs as a trial that changes none of your files, and is stopped after some steps. --batch-curve changes
    the batch size of its DataLoader between steps, on a CPU; a script that makes its own batches, loads them in worker
    processes or compiles its model is refused. Exit code: 0 done; the script's own if it fails; 128 + the signal's
    number if a signal kills it; 1 if it takes too few steps within --patience.
    """
    from flatout.arguments import as_seconds
    from flatout.machine.visible_devices import show_only
    from flatout.report.memory_text import memory_document, memory_text
    from flatout.script.entry import Target
    from flatout.script.memory_trial import MemoryRequest, watch_memory
    from flatout.sizing.script_curve import CurveRequest
    from flatout.units import parse_positive_seconds, parse_seconds

    _check_options(steps, batch_curve, budget)
    script, patience_seconds = Target.from_command(target), parse_positive_seconds(patience, "--patience")
    show_only(device)
    if batch_curve:
        curve_request = CurveRequest(
            target=script,
            budget_seconds=as_seconds(parse_seconds("60s" if budget is None else budget), "--budget"),
            patience_seconds=patience_seconds,
            isolation=isolation,
            allow_network=allow_network,
        )
        return _batch_curve(curve_request, json, include_private)
    request = MemoryRequest(
        target=script,
        steps=steps or STEPS,
        patience_seconds=patience_seconds,
        isolation=isolation,
        allow_network=allow_network,
    )
    with signals_as_exits():
        watched = watch_memory(request)
    tell(*watched.errors.splitlines())
    if not watched.status or watched.memory.steps:  # a script that fails at once has shown why: there is nothing to add
        saved = memory_document(watched, include_private=include_private)
        print(to_text(saved) if json else memory_text(watched))
    return watched.status or 0


def _check_options(steps: int | None, batch_curve: bool, budget: str | None) -> None:
    if steps is not None and steps < 1:
        raise UsageError(f"--steps is {steps}", limit="it is at least 1")
    if steps is not None and batch_curve:
        raise UsageError("--steps together with --batch-curve", limit="steps are taken until --budget is spent")
    if budget is not None and not batch_curve:
        raise UsageError("--budget without --batch-curve", limit="--patience bounds a watched run")


def _batch_curve(request: CurveRequest, json: bool, include_private: bool) -> int:
    from flatout.sizing.script_curve import script_batch_curve

    with signals_as_exits(), progress_line() as progress, stdin_copy() as stdin_file:
        curve = script_batch_curve(replace(request, stdin_file=stdin_file), progress)
    script = request.target
    payload = {"script": {"name": script.name, "arguments": list(script.arguments)}, **curve.to_json()}
    print(to_text(document("batch-curve", payload, include_private=include_private)) if json else curve)
    return 0
