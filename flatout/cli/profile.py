"""flatout profile: where the time of a step goes, by part, line, module and operator."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flatout.cli.command_line import on_cpu, refuse_alone, refuse_guard
from flatout.cli.shared_options import (
    AllowNetworkOption,
    DeviceOption,
    IncludePrivateOption,
    IsolationOption,
    PatienceOption,
    TargetArgument,
)
from flatout.cli.streams import progress_line, stdin_copy
from flatout.errors import FlatoutError, MachineError, UsageError
from flatout.signals import signals_as_exits
from flatout.temporary_folders import temporary_folder
from flatout.terminal import is_terminal, tell
from flatout.whole_files import can_be_written

if TYPE_CHECKING:
    from collections.abc import Callable

    from flatout.profiling.profile import GroupBy, SortBy
    from flatout.report.profile_text import ScriptProfile
    from flatout.script.profile_trial import ProfileRequest, ProfileWatched
    from flatout.script.replicas.settings import Settings
    from flatout.train.loggers import TensorBoardLog

Batch = Literal["global", "per-device"]
Loss = Literal["mean", "sum", "terms"]
By = Literal["name", "shape", "line"]
Sort = Literal["time", "calls", "flops", "bytes"]

Tensorboard = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Write the trace and scalars for TensorBoard; needs tensorboard."),
]
Devices = Annotated[
    str | None,
    typer.Option(
        metavar="N", help="Run a script for one device on N, as flatout run --devices does; profile each rank."
    ),
]


def profile(
    target: TargetArgument,
    steps: Annotated[int, typer.Option(metavar="N", help="Steps to profile, after those of warm-up.")] = 5,
    by: Annotated[By, typer.Option("--by", help="Add operators up by name, by input shapes, or by line.")] = "name",
    sort: Annotated[
        Sort, typer.Option("--sort", help="The largest of this first, in the table of operators.")
    ] = "time",
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a Chrome trace for ui.perfetto.dev: .json or .json.gz.")
    ] = None,
    tensorboard: Tensorboard = None,
    operators: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the table of operators: .csv, .json or .txt.")
    ] = None,
    patience: PatienceOption = "30m",
    device: DeviceOption = None,
    devices: Devices = None,
    batch: Annotated[
        Batch | None, typer.Option(help="What a batch size counts with --devices, as in flatout run: default global.")
    ] = None,
    loss: Annotated[
        Loss | None, typer.Option(help="What the loss is over its batch with --devices, as in flatout run.")
    ] = None,
    allow_local_batchnorm: Annotated[
        bool, typer.Option("--allow-local-batchnorm", help="With --devices: let batch norms see a rank's share alone.")
    ] = False,
    isolation: IsolationOption = "auto",
    allow_network: AllowNetworkOption = False,
    include_private: IncludePrivateOption = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> int:
    """Show where the time of a training step goes, and how far it is from what this machine can do.

    The script runs as a trial that changes none of your files: a few steps are timed as they are, one is followed
    operator by operator, a few run under torch's profiler; then it is stopped. A script that succeeds with fewer
    steps is started a second time and profiled on what there is. Processes that it starts to train in (mp.spawn,
    torchrun) are profiled each by itself, and shown side by side. Exit code: 0 done; the script's own if it fails;
    128 + the signal's number if a signal kills it; 1 if it takes too few steps within --patience.
    """
    from flatout.application.profile import profile_script
    from flatout.machine.visible_devices import show_only
    from flatout.report.document import to_text
    from flatout.report.profile_text import profile_document
    from flatout.script.entry import Target
    from flatout.script.profile_trial import ProfileRequest, watch_profile
    from flatout.script.replicas.settings import Settings
    from flatout.units import parse_positive_seconds

    _check(steps, trace, operators)
    script, patience_seconds = Target.from_command(target), parse_positive_seconds(patience, "--patience")
    script.check_exists()
    log = _tensorboard_log(tensorboard) if tensorboard is not None else None
    show_only(device)
    watching: Callable[[ProfileRequest], ProfileWatched] = watch_profile
    if devices is None:
        refuse_alone({"--batch": batch, "--loss": loss, "--allow-local-batchnorm": allow_local_batchnorm})
    else:
        sharing = Settings(batch=batch or "global", loss=loss, allow_local_batchnorm=allow_local_batchnorm)
        watching = _on_devices(devices, device, sharing, isolation=isolation, allow_network=allow_network)
    with signals_as_exits(), temporary_folder("profile") as folder:
        with progress_line() as progress, stdin_copy() as stdin_file:
            request = ProfileRequest(
                target=script,
                steps=steps,
                patience_seconds=patience_seconds,
                isolation=isolation,
                allow_network=allow_network,
                trace_folder=None if trace is None and tensorboard is None else folder,
                stdin_file=stdin_file,
            )
            found = profile_script(request, progress, watching)
        tell(*found.watched.errors.splitlines())
        exported = _export(found, by, sort, trace=trace, tensorboard=tensorboard, operators=operators, log=log)
    if not found.watched.status or found.watched.steps:  # a script that fails at once has shown why
        document = profile_document(found, include_private=include_private)
        print(to_text(document) if json else _text(found, by, sort, exported.files))
    exported.tell_of_missing()
    return found.watched.status or 0


def _check(steps: int, trace: Path | None, operators: Path | None) -> None:
    """UsageError before anything runs."""
    from flatout.profiling.exports import check_table, check_trace

    if steps < 1:
        raise UsageError(f"--steps is {steps}", limit="it is at least 1")
    if trace is not None:
        check_trace(trace)
    if operators is not None:
        check_table(operators)


def _on_devices(
    devices: str, device: str | None, sharing: Settings, *, isolation: str, allow_network: bool
) -> Callable[[ProfileRequest], ProfileWatched]:
    """How the trial is run. UsageError for devices that are not there."""
    from flatout.script.isolation.namespaces import own_network
    from flatout.script.replicas.profiling import profile_on_devices
    from flatout.script.replicas.starting import device_count

    refuse_guard(isolation, "--devices")
    count, visible = device_count(devices, on_cpu=on_cpu(device))
    if count == 1:
        raise UsageError("--devices 1", limit="one device is a plain profile", remedy="leave --devices out")
    if not allow_network:
        own_network()  # of this process, and so of all ranks: they reach each other alone
    return lambda request: profile_on_devices(request, count, replace(sharing, visible=visible))


def _text(found: ScriptProfile, by: GroupBy, sort: SortBy, files: list[tuple[str, Path]]) -> str:
    """Rows are cut on a terminal alone."""
    from flatout.report.profile_text import LINE_WIDTH, script_text

    return script_text(found, by=by, sort=sort, files=files, width=LINE_WIDTH if is_terminal(sys.stdout) else None)


def _tensorboard_log(folder: Path) -> TensorBoardLog:
    from importlib.util import find_spec

    from flatout.train.loggers import TensorBoardLog

    if os.path.exists(folder) and not os.path.isdir(folder):
        raise UsageError(f"{folder} is a file", limit="--tensorboard names a folder")
    existing = next(one for one in (folder.absolute(), *folder.absolute().parents) if os.path.exists(one))
    if not can_be_written(existing / "events"):
        raise UsageError(f"cannot write to {folder}", remedy="name a folder that you may write")
    if find_spec("tensorboard") is None:
        raise MachineError(
            "the package tensorboard is not installed", limit="--tensorboard needs it", remedy="pip install tensorboard"
        )
    return TensorBoardLog(folder)


@dataclass
class Exported:
    """What was written, (what, where); what was not, and why; and the first error, which comes after the results."""

    files: list[tuple[str, Path]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    error: FlatoutError | None = None

    def tell_of_missing(self) -> None:
        tell(*(f"flatout: {line}" for line in self.missing))
        if self.error is not None:
            raise self.error


def _export(
    found: ScriptProfile,
    by: GroupBy,
    sort: SortBy,
    *,
    trace: Path | None,
    tensorboard: Path | None,
    operators: Path | None,
    log: TensorBoardLog | None,
) -> Exported:
    from flatout.profiling.exports import write_table, write_tensorboard, write_trace

    profile, recorded = found.profile, found.watched.trace
    exported = Exported()

    def write(what: str, path: Path, writing: Callable[[], object]) -> None:
        try:
            writing()
            exported.files.append((what, path))
        except FlatoutError as error:
            exported.error = exported.error or error

    def left_out(path: Path, why: str) -> None:
        exported.missing.append(f"{path} was not written: {why.removeprefix('unknown, because ')}")

    if profile is None:
        for path in filter(None, (trace, tensorboard, operators)):
            left_out(path, "no step was profiled")
        return exported
    if trace is not None and recorded is not None:
        write("trace", trace, lambda: write_trace(recorded, trace))
    elif trace is not None:
        left_out(trace, profile.reasons.get("operators", "nothing was recorded"))
    if tensorboard is not None and log is not None:
        write("TensorBoard", tensorboard, lambda: write_tensorboard(tensorboard, recorded, profile, log))
    if operators is not None:
        write("operators", operators, lambda: write_table(operators, profile.operators_by(by, sort)))
    return exported
