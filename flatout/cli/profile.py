"""flatout profile: where the time of a step goes, by part, line, module and operator."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flatout.cli.ended_by_signal import signals_as_exits
from flatout.cli.progress_line import progress_line
from flatout.cli.stdin_copy import stdin_copy
from flatout.cli.trial_options import AllowNetworkOption, DeviceOption, IncludePrivateOption, IsolationOption

if TYPE_CHECKING:
    from flatout.diagnose.profile_summary import ScriptProfile
    from flatout.profiling.profile import GroupBy, SortBy
    from flatout.train.loggers import TensorBoardLog

By = Literal["name", "shape", "line"]
Sort = Literal["time", "calls", "flops", "bytes"]


def profile(
    target: Annotated[list[str], typer.Argument(help="The script and its own arguments, or -m MODULE.")],
    steps: Annotated[int, typer.Option(metavar="N", help="Steps to profile, after those of warm-up.")] = 5,
    by: Annotated[By, typer.Option("--by", help="Add operators up by name, by input shapes, or by line.")] = "name",
    sort: Annotated[
        Sort, typer.Option("--sort", help="The largest of this first, in the table of operators.")
    ] = "time",
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a Chrome trace for ui.perfetto.dev: .json or .json.gz."),
    ] = None,
    tensorboard: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write the trace and scalars for TensorBoard; needs tensorboard."),
    ] = None,
    operators: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the table of operators: .csv, .json or .txt.")
    ] = None,
    patience: Annotated[
        str, typer.Option(metavar="TIME", help="End a script that has not taken its steps by then.")
    ] = "30m",
    device: DeviceOption = None,
    isolation: IsolationOption = "auto",
    allow_network: AllowNetworkOption = False,
    include_private: IncludePrivateOption = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> int:
    """Show where the time of a training step goes, and how far it is from what this machine can do.

    The script runs as a trial that changes none of your files: a few steps are timed as they are, one is followed
    operator by operator, a few run under torch's profiler; then it is stopped. A script with fewer steps is started a
    second time and profiled on what there is. Exit code: 0 done; the script's own if it fails; 128 + the signal's
    number if a signal kills it; 1 if it takes too few steps within --patience.
    """
    from flatout.application.profile import profile_script
    from flatout.errors import UsageError
    from flatout.machine.visible_devices import show_only
    from flatout.profiling.exports import check_table, check_trace
    from flatout.report.document import to_text
    from flatout.report.profile_text import profile_document, script_text
    from flatout.script.entry import Target
    from flatout.script.profile_trial import ProfileRequest
    from flatout.units import parse_seconds

    if steps < 1:
        raise UsageError(f"--steps is {steps}", limit="it is at least 1")
    if trace is not None:
        check_trace(trace)
    if operators is not None:
        check_table(operators)
    script, patience_seconds = Target.from_command(target), parse_seconds(patience)
    script.check_exists()
    log = _tensorboard_log(tensorboard) if tensorboard is not None else None
    show_only(device)
    with TemporaryDirectory(prefix="flatout-profile-") as folder:
        wants_trace = trace is not None or tensorboard is not None
        with signals_as_exits(), progress_line() as progress, stdin_copy() as stdin_file:
            request = ProfileRequest(
                target=script,
                steps=steps,
                patience_seconds=patience_seconds,
                isolation=isolation,
                allow_network=allow_network,
                trace_folder=Path(folder) if wants_trace else None,
                stdin_file=stdin_file,
            )
            found = profile_script(request, progress)
        sys.stderr.write(found.watched.errors)
        files = _export(found, by, sort, trace=trace, tensorboard=tensorboard, operators=operators, log=log)
    if not found.watched.status or found.watched.steps:  # a script that fails at once has shown why
        document = profile_document(found, include_private=include_private)
        print(to_text(document) if json else script_text(found, by=by, sort=sort, files=files))
    return found.watched.status or 0


def _tensorboard_log(folder: Path) -> TensorBoardLog:
    from importlib.util import find_spec

    from flatout.errors import MachineError, UsageError
    from flatout.train.loggers import TensorBoardLog

    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file", limit="--tensorboard names a folder")
    if find_spec("tensorboard") is None:
        raise MachineError(
            "the package tensorboard is not installed", limit="--tensorboard needs it", remedy="pip install tensorboard"
        )
    return TensorBoardLog(folder)


def _export(
    found: ScriptProfile,
    by: GroupBy,
    sort: SortBy,
    *,
    trace: Path | None,
    tensorboard: Path | None,
    operators: Path | None,
    log: TensorBoardLog | None,
) -> list[tuple[str, Path]]:
    """What was written: (what, where)."""
    from flatout.profiling.exports import write_table, write_tensorboard, write_trace

    files: list[tuple[str, Path]] = []
    recorded = found.watched.trace
    if found.profile is None:
        return files
    if trace is not None and recorded is not None:
        write_trace(recorded, trace)
        files.append(("trace", trace))
    if tensorboard is not None and log is not None:
        write_tensorboard(tensorboard, recorded, found.profile, log)
        files.append(("TensorBoard", tensorboard))
    if operators is not None:
        rows = found.profile.operators_by(by, sort)
        write_table(operators, rows)
        files.append(("operators", operators))
    return files
