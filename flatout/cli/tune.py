"""flatout tune: find the fastest way to run a script whose numbers still hold."""

from __future__ import annotations

import shlex
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flatout.cli.ended_by_signal import signals_as_exits
from flatout.cli.progress_line import progress_line
from flatout.cli.stdin_copy import stdin_copy
from flatout.cli.trial_options import (
    AllowNetworkOption,
    DeviceOption,
    ExactnessOption,
    IncludePrivateOption,
    IsolationOption,
)

if TYPE_CHECKING:
    from flatout.application.tune import TuneResult
    from flatout.tuning.script_tuning import TuneRequest

PLAN_NAME, REPORT_NAME = "flatout.toml", "flatout-report.json"


def tune(
    target: Annotated[list[str], typer.Argument(help="The script and its own arguments, or -m MODULE.")],
    budget: Annotated[
        str, typer.Option(metavar="TIME", help="Time for search, proof and comparison: 90s, 10m, 1h.")
    ] = "10m",
    steps: Annotated[
        int | None, typer.Option(metavar="N", help="Steps of the real run, to weigh start-up costs against.")
    ] = None,
    exactness: ExactnessOption = "reduced",
    fit: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Bring the memory of a step's tensors under this size: 12GiB, 900MiB."),
    ] = None,
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Folder for flatout.toml and flatout-report.json.")
    ] = Path("."),
    logs: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Keep the output of trials in this folder.")
    ] = None,
    device: DeviceOption = None,
    isolation: IsolationOption = "auto",
    allow_network: AllowNetworkOption = False,
    include_private: IncludePrivateOption = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> int:
    """Find the fastest way to run an unmodified script with the numbers still right; write flatout.toml and a report.

    The script runs in trials that change none of your files. Exit code: 0 done, 1 the script cannot be tuned, or
    cannot be brought under --fit.
    """
    from flatout.application.tune import tune_requested
    from flatout.arguments import as_bytes, as_seconds
    from flatout.script.entry import Target
    from flatout.tuning.script_tuning import TuneRequest
    from flatout.units import parse_seconds

    request = TuneRequest(
        target=(script := Target.from_command(target)),
        budget_seconds=as_seconds(parse_seconds(budget), "--budget"),
        exactness=exactness,
        total_steps=_positive("--steps", steps),
        fit_bytes=None if fit is None else as_bytes(fit, "--fit"),
        isolation=isolation,
        allow_network=allow_network,
        log_folder=logs,
    )
    _prepare(request, out, device)
    with signals_as_exits(), progress_line() as progress, stdin_copy() as stdin_file:
        result = tune_requested(replace(request, stdin_file=stdin_file), progress)
    return _told_and_saved(result, out, json, [*_seeing(device), *script.command], include_private=include_private)


def _prepare(request: TuneRequest, output: Path, device: str | None) -> None:
    """What cannot be used is named before any time is spent."""
    from flatout.machine.visible_devices import show_only
    from flatout.script.work_folder import require_linux

    require_linux()
    request.target.check()
    _check_writable(output)
    show_only(device)


def _told_and_saved(result: TuneResult, output: Path, json: bool, command: list[str], *, include_private: bool) -> int:
    """The exit code. A plan that does not fit where it was to is not written."""
    from flatout.report.document import to_text
    from flatout.report.tune_text import tune_document, tune_text
    from flatout.tuning.short_budget import budget_option

    document = tune_document(result, include_private=include_private)
    print(to_text(document) if json else tune_text(result, budget_option))
    _save(result, document, output, include_private=include_private)
    if not json:
        print(f"{'saved':<10}{_saved(result, output, command)}")
    return 0 if result.fits else 1


def _save(result: TuneResult, document: dict[str, object], output: Path, *, include_private: bool) -> None:
    """Write plan and report; minutes of work must not be lost to a disk that is full by now."""
    from flatout.plan import write_plan
    from flatout.report.document import write_document

    try:
        if result.fits:
            write_plan(output / PLAN_NAME, result.plan, include_private=include_private)
        write_document(output / REPORT_NAME, document)
    except Exception:
        sys.stderr.write(f"the results could not be saved; here is the plan:\n\n{result.plan.to_toml()}\n")
        raise


def _saved(result: TuneResult, output: Path, command: list[str]) -> str:
    """Where it is, and how the script is run by it."""
    if not result.fits:
        return f"{output / REPORT_NAME}, and no plan: it would not fit"
    return f"{output / PLAN_NAME}, {output / REPORT_NAME}      next: flatout run {shlex.join(command)}"


def _seeing(device: str | None) -> list[str]:
    return [] if device is None else ["--device", device]


def _positive(name: str, value: int | None) -> int | None:
    from flatout.errors import UsageError

    if value is not None and value < 1:
        raise UsageError(f"{name} is {value}", limit="it is at least 1")
    return value


def _check_writable(folder: Path) -> None:
    """Minutes of trials must not end in a folder that takes no file."""
    from flatout.errors import UsageError

    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(
            f"cannot write to {folder.absolute()}: {error.strerror}",
            limit="the plan and the report are written there",
            remedy="choose another folder with --out",
        ) from None
