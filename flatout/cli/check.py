"""flatout check: what this machine is, how fast it is, and what should be fixed; or the same of a model."""

from __future__ import annotations

from typing import Annotated

import typer

from flatout.cli.shared_options import DeviceOption
from flatout.cli.streams import progress_line, stdout_to_stderr
from flatout.errors import UsageError
from flatout.report.document import document, to_text
from flatout.terminal import tell

InstallOption = Annotated[
    str | None,
    typer.Option("--install", metavar="pip|conda", help="Print the lines that install torch on this machine."),
]
TorchOption = Annotated[
    str | None,
    typer.Option("--torch", metavar="VERSION", help="With --install: this version instead of the installed one."),
]


def check(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Check this model instead of the machine: file.py:name, package.module:name or a Hugging Face folder."
        ),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure the ceilings and keep them (half a minute).")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="With --measure: a few seconds, less precise.")] = False,
    forget_tunes: Annotated[
        bool, typer.Option("--forget-tunes", help="First delete the history of earlier tunes.")
    ] = False,
    install: InstallOption = None,
    torch: TorchOption = None,
    device: DeviceOption = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> int:
    """Describe this machine: what it is, how fast it is, and what should be fixed. Or check a model before training.

    With MODEL its file is executed and the model is built, by a call without arguments if it is a function; the model
    is not run. Exit code: 0 fine, 1 unusable, 2 something should be fixed, or the model cannot be built.
    """
    from flatout.application.check import check as check_here
    from flatout.machine.visible_devices import show_only

    if quick and not measure:
        raise UsageError("--quick applies only to --measure", remedy="pass --measure too")
    if torch is not None and install is None:
        raise UsageError("--torch applies only to --install", remedy="pass --install pip or --install conda too")
    of_machine = {"--measure": measure, "--forget-tunes": forget_tunes, "--install": install is not None}
    given = next((name for name, used in of_machine.items() if used), None)
    if model is not None and given is not None:
        raise UsageError(f"{given} applies only to the machine", remedy=f"leave out {model}")
    if forget_tunes:
        from flatout.tuning.history import forget_tunes as forget

        gone = forget()
        tell("no earlier tunes were kept" if gone is None else f"deleted {gone}")
    show_only(device)
    if model is not None:
        return _check_model(model, json=json)
    if install is not None:
        return _print_install_lines(install, torch, json=json)
    with progress_line() as progress:
        found = check_here(measure=measure, quick=quick, progress=lambda what: progress(f"measuring {what}"))
    for warning in found.warnings:
        tell(f"warning: {warning}")
    print(to_text(document("check", found.to_json(), include_private=False)) if json else found.summary())
    return found.exit_code


def _check_model(model: str, *, json: bool) -> int:
    from flatout.application.check_model import check_model
    from flatout.report.model_text import model_document, model_text

    with stdout_to_stderr():  # what the model's own code prints is not our document
        found = check_model(model)
    about = (found.name, found.model, found.findings)
    print(to_text(model_document(*about)) if json else model_text(*about))
    return found.exit_code


def _print_install_lines(installer: str, torch: str | None, *, json: bool) -> int:
    """On stdout the commands alone, as comments what they are for. Exit code: 0, or 1 where they are unknown."""
    from flatout.machine.detect import detect
    from flatout.machine.torch_builds import install_advice
    from flatout.report.machine_text import install_text

    advice = install_advice(detect(), installer, torch)
    print(to_text(document("install", advice.to_json())) if json else install_text(advice))
    return 0 if advice.lines else 1
