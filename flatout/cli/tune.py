"""flatout tune: find the fastest way to run a script whose numbers still hold, or for ranks to share a model."""

from __future__ import annotations

import re
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from flatout.cli.command_line import on_cpu, refuse_alone, refuse_guard
from flatout.cli.shared_options import (
    AllowNetworkOption,
    DeviceOption,
    ExactnessOption,
    IncludePrivateOption,
    IsolationOption,
)
from flatout.cli.streams import progress_line, stdin_copy
from flatout.errors import UsageError
from flatout.signals import signals_as_exits
from flatout.terminal import tell

if TYPE_CHECKING:
    from flatout.application.tune import TuneResult
    from flatout.plan import Plan
    from flatout.tuning.script_tuning import TuneRequest

PLAN_NAME, REPORT_NAME = "flatout.toml", "flatout-report.json"
FUNCTION = re.compile(r"(?P<source>[^:]+):(?P<name>[A-Za-z_][\w.]*)")
Loss = Literal["mean", "sum", "terms"]

TargetArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="SCRIPT",
        help="The script and its own arguments, or -m MODULE; or train.py:make, a function that is called with a plan "
        "and returns (TrainStep, batches).",
    ),
]
BudgetOption = Annotated[
    str,
    typer.Option(
        metavar="TIME", help="Time for search, proof and comparison: 90s, 10m, 1h. Very long steps take longer."
    ),
]
PlanOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="With train.py:make: the plan that its strategy is added to.")
]
DevicesOption = Annotated[
    str | None,
    typer.Option(
        metavar="N",
        help="Compare training on up to N GPUs, or in N processes on the CPU, with one device; auto: all GPUs. For "
        "train.py:make: how N of them best share the model.",
    ),
]
NprocOption = Annotated[
    str | None,
    typer.Option(
        metavar="N",
        help="The script trains in N ranks by itself: start it as torchrun would; auto: a rank for each GPU.",
    ),
]
OwnRanksOption = Annotated[
    str | None,
    typer.Option(metavar="N", help="The script trains in N processes that it starts itself, as by mp.spawn."),
]
LossOption = Annotated[
    Loss | None,
    typer.Option(
        metavar="KIND", help="With --devices: what the loss is over its batch, as for flatout run: mean, sum, terms."
    ),
]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Where the results go, and how."""

    folder: Path
    json: bool
    """Print one JSON document in place of text."""
    include_private: bool


def tune(
    target: TargetArgument,
    budget: BudgetOption = "10m",
    steps: Annotated[
        int | None, typer.Option(metavar="N", help="Steps of the real run, to weigh start-up costs against.")
    ] = None,
    exactness: ExactnessOption = "reduced",
    fit: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Bring the memory of a step's tensors under this size: 12GiB, 900MiB."),
    ] = None,
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Folder for flatout.toml and flatout-report.json, made if missing.")
    ] = Path("."),
    logs: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Keep the output of trials in this folder.")
    ] = None,
    device: DeviceOption = None,
    devices: DevicesOption = None,
    nproc_per_node: NprocOption = None,
    own_ranks: OwnRanksOption = None,
    loss: LossOption = None,
    allow_local_batchnorm: Annotated[
        bool,
        typer.Option("--allow-local-batchnorm", help="With --devices: batch norms may see a device's share alone."),
    ] = False,
    plan: PlanOption = None,
    isolation: IsolationOption = "auto",
    allow_network: AllowNetworkOption = False,
    include_private: IncludePrivateOption = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> int:
    """Find the fastest way to run an unmodified script with the numbers still right; write flatout.toml and a report.

    The script runs in trials that change none of your files. Exit code: 0 done, 1 the script cannot be tuned, or
    cannot be brought under --fit.
    """
    from flatout.arguments import as_bytes, as_seconds
    from flatout.script.entry import Target
    from flatout.tuning.script_tuning import TuneRequest
    from flatout.units import parse_seconds

    budget_seconds = as_seconds(parse_seconds(budget), "--budget")
    wanted = Wanted(folder=out, json=json, include_private=include_private)
    if steps is not None and steps < 1:
        raise UsageError(f"--steps is {steps}", limit="it is at least 1")
    ways = {"--nproc-per-node": nproc_per_node, "--own-ranks": own_ranks}
    if _is_function(target):
        stray = {"--steps": steps, "--exactness": exactness != "reduced", "--fit": fit, "--logs": logs, **ways}
        stray |= {"--loss": loss, "--allow-local-batchnorm": allow_local_batchnorm, "--isolation": isolation != "auto"}
        return _tune_strategies(
            target,
            devices,
            budget_seconds=budget_seconds,
            plan_file=plan,
            device=device,
            allow_network=allow_network,
            wanted=wanted,
            stray=stray,
        )
    if plan is not None:
        raise UsageError(
            "--plan with a script",
            limit="a tune finds the plan of a script from nothing",
            remedy="to run a script by a plan: flatout run --plan FILE train.py",
        )
    request = TuneRequest(
        target=Target.from_command(target),
        budget_seconds=budget_seconds,
        exactness=exactness,
        total_steps=steps,
        fit_bytes=None if fit is None else as_bytes(fit, "--fit"),
        isolation=isolation,
        allow_network=allow_network,
        log_folder=logs,
    )
    asked = {**ways, "--devices": devices}
    return _tune_script(request, asked, device, loss, wanted, local_batchnorm=allow_local_batchnorm)


def _tune_script(
    request: TuneRequest,
    asked: dict[str, str | None],
    device: str | None,
    loss: Loss | None,
    wanted: Wanted,
    *,
    local_batchnorm: bool,
) -> int:
    """The exit code. asked: by the option, how many ranks or devices."""
    from flatout.application.tune import tune_requested

    _prepare(request, wanted.folder, device)
    request = _in_ranks(request, asked)
    if (devices := asked["--devices"]) is None:
        refuse_alone({"--loss": loss, "--allow-local-batchnorm": local_batchnorm})
    else:
        request = _on_several(request, devices, device, loss, local_batchnorm=local_batchnorm)
    with signals_as_exits(), progress_line() as progress, stdin_copy() as stdin_file:
        result = tune_requested(replace(request, stdin_file=stdin_file), progress)
    options = [*_seeing(device), *_sharing(result, loss, allow_local_batchnorm=local_batchnorm)]
    if wanted.folder.resolve() != Path.cwd():
        options += ["--plan", str(wanted.folder / PLAN_NAME)]
    command = [*_run_in(None if request.starts_ranks else request.ranks), *options, *request.target.command]
    return _told_and_saved(result, wanted, command)


def _run_in(ranks: int | None) -> list[str]:
    """What runs a script with its plan."""
    return ["flatout", "run"] if ranks is None else ["torchrun", "--nproc-per-node", str(ranks), "-m", "flatout", "run"]


def _in_ranks(request: TuneRequest, asked: dict[str, str | None]) -> TuneRequest:
    """asked: by the option, how many ranks or devices."""
    from flatout.application.tune import one_of_ways, ranks_of_script

    way = one_of_ways(asked)
    if way is None or way[0] == "--devices":
        return request
    option, number = way
    refuse_guard(request.isolation, option)
    return replace(request, ranks=ranks_of_script(number, option), starts_ranks=option == "--own-ranks")


def _on_several(
    request: TuneRequest, devices: str, device: str | None, loss: Loss | None, *, local_batchnorm: bool
) -> TuneRequest:
    """With the numbers of devices that are compared."""
    from flatout.application.tune import devices_asked
    from flatout.script.replicas.settings import Settings

    refuse_guard(request.isolation, "--devices")
    asked = devices_asked(
        devices,
        exactness=request.exactness,
        fits=request.fit_bytes is not None,
        on_cpu=on_cpu(device),
        settings=Settings(loss=loss, allow_local_batchnorm=local_batchnorm),
    )
    return replace(request, devices=asked)


def _prepare(request: TuneRequest, output: Path, device: str | None) -> None:
    """What cannot be used is named before any time is spent."""
    from flatout.machine.visible_devices import show_only
    from flatout.script.work_folder import require_linux

    require_linux()
    try:
        Path.cwd()
    except FileNotFoundError:  # not even torch can be loaded there
        raise UsageError("the current folder was removed", remedy="change to one that exists") from None
    request.target.check()
    _check_writable(output)
    show_only(device)


def _told_and_saved(result: TuneResult, wanted: Wanted, command: list[str]) -> int:
    """The exit code. A plan that does not fit where it was to is not written."""
    from flatout.report.document import to_text
    from flatout.report.tune_text import tune_document, tune_text
    from flatout.tuning.short_budget import budget_option

    document = tune_document(result, budget_option, include_private=wanted.include_private)
    # First: printing may fail, as into a closed pipe.
    _save(result.plan, document, wanted, plans=result.fits)
    print(to_text(document) if wanted.json else tune_text(result, budget_option))
    if not wanted.json:
        print(f"{'saved':<10}{_saved(result, wanted.folder, command)}")
    return 0 if result.fits else 1


def _saved(result: TuneResult, output: Path, command: list[str]) -> str:
    """Where it is, and the command that runs the script by it."""
    if not result.fits:
        return f"{output / REPORT_NAME}, and no plan: it would not fit"
    return f"{output / PLAN_NAME}, {output / REPORT_NAME}      next: {shlex.join(command)}"


def _sharing(result: TuneResult, loss: str | None, *, allow_local_batchnorm: bool) -> list[str]:
    """Options that a run on several devices needs, which no plan holds."""
    if result.plan.devices is None:
        return []
    return [*(["--loss", loss] if loss is not None else []), *["--allow-local-batchnorm"] * allow_local_batchnorm]


def _seeing(device: str | None) -> list[str]:
    return [] if device is None else ["--device", device]


def _check_writable(folder: Path) -> None:
    """Minutes of trials must not end in a folder that takes no file, or that cannot be made."""
    there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise UsageError(
            f"cannot write to {folder.absolute()}: {error.strerror}",
            limit="the plan and the report are written there",
            remedy="choose another folder with --out",
        ) from None


def _save(plan: Plan, document: dict[str, object], wanted: Wanted, *, plans: bool) -> None:
    """Write the report and, where `plans`, the plan; minutes of work must not be lost to a disk that is full by now."""
    from flatout.plan import write_plan
    from flatout.report.document import write_document

    try:
        wanted.folder.mkdir(parents=True, exist_ok=True)
        if plans:
            write_plan(wanted.folder / PLAN_NAME, plan, include_private=wanted.include_private)
        write_document(wanted.folder / REPORT_NAME, document)
    except Exception:
        tell(f"the results could not be saved; here is the plan:\n\n{plan.to_toml()}")
        raise


# train.py:make


def _is_function(target: Sequence[str]) -> bool:
    """Is it 'train.py:make'? Otherwise a script or a module."""
    return bool(target and FUNCTION.fullmatch(target[0])) and not Path(target[0]).exists()


def _tune_strategies(
    target: Sequence[str],
    devices: str | None,
    *,
    budget_seconds: float,
    plan_file: Path | None,
    device: str | None,
    allow_network: bool,
    wanted: Wanted,
    stray: Mapping[str, object],
) -> int:
    """The exit code. stray: options that are for scripts, with what was given."""
    from flatout.application.choose_parallel import choose_requested, strategies_asked
    from flatout.machine.visible_devices import show_only
    from flatout.plan import Plan, read_plan
    from flatout.report.document import to_text
    from flatout.report.strategies_text import strategies_document, strategies_text
    from flatout.tuning.short_budget import budget_option

    if len(target) > 1:
        raise UsageError(
            f"{' '.join(target[1:])} after {target[0]}", limit="the function is called with a plan and nothing else"
        )
    for option, value in stray.items():
        if value:
            limit = "it is for a script; train.py:make makes a step"
            raise UsageError(f"{option} with {target[0]}", limit=limit, remedy=f"leave {option} out")
    if devices is None:
        raise UsageError(
            f"{target[0]} without --devices",
            limit="it says how many ranks share the training",
            remedy="use --devices 2; the other choices of a plan: flatout.tune(step, batches) in Python",
        )
    out = wanted.folder
    _check_writable(out)
    show_only(device)
    plan = Plan() if plan_file is None else read_plan(plan_file)
    request = strategies_asked(
        target[0], devices, plan, budget_seconds, on_cpu=on_cpu(device), allow_network=allow_network
    )
    with signals_as_exits(), progress_line() as progress:
        found = choose_requested(request, progress)
    document = strategies_document(found, found.machine, include_private=wanted.include_private)
    _save(found.plan, document, wanted, plans=found.chosen is not None)
    print(to_text(document) if wanted.json else strategies_text(found, found.machine, budget_option))
    if not wanted.json:
        if found.chosen is None:
            print(f"{'saved':<10}{out / REPORT_NAME}, and no plan: nothing was added to that of one process")
        else:
            start = f"flatout launch --nproc-per-node {found.ranks} YOUR_SCRIPT, with this plan"
            print(f"{'saved':<10}{out / PLAN_NAME}, {out / REPORT_NAME}      next: {start}")
    return 0
