"""flatout check: what this machine is, how fast it can be, and what to put right."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from flatout.cli.install_option import InstallOption, TorchOption, print_install_lines
from flatout.cli.trial_options import DeviceOption

if TYPE_CHECKING:
    from flatout.machine.description import Machine


def check(
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure the ceilings and keep them (half a minute).")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="With --measure: in a few seconds, less surely.")] = False,
    forget_tunes: Annotated[
        bool, typer.Option("--forget-tunes", help="First delete what earlier tunes measured and left for later ones.")
    ] = False,
    install: InstallOption = None,
    torch: TorchOption = None,
    device: DeviceOption = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> int:
    """What this machine is, how fast it can be, and what to put right.

    Exit code: 0 fine, 1 unusable, 2 something should be put right.
    """
    from flatout.diagnose.machine_checks import check_machine, gather_facts
    from flatout.errors import UsageError
    from flatout.machine.detect import detect
    from flatout.machine.visible_devices import show_only
    from flatout.report.document import document, to_text
    from flatout.report.machine_text import check_text, exit_code, verdict

    if quick and not measure:
        raise UsageError("--quick says how to measure", remedy="pass --measure too")
    if torch is not None and install is None:
        raise UsageError("--torch says what to install", remedy="pass --install pip or --install conda too")
    if forget_tunes:
        _forget_tunes()
    show_only(device)
    if install is not None:
        return print_install_lines(install, torch, json=json)
    machine = detect()
    findings = check_machine(machine, gather_facts())
    code = exit_code(findings)
    if measure and code != 1:
        machine = _measured(machine, quick=quick)
    if json:
        found = {"machine": machine.to_json(), "findings": [finding.to_json() for finding in findings]}
        print(to_text(document("check", {"verdict": verdict(findings), **found})))
    else:
        print(check_text(machine, findings))
    return code


def _forget_tunes() -> None:
    from flatout.tuning.history import forget_tunes

    gone = forget_tunes()
    print("no earlier tunes were kept" if gone is None else f"deleted {gone}", file=sys.stderr)


def _measured(machine: Machine, *, quick: bool) -> Machine:
    """The machine with its ceilings, which are kept for the next time. Progress goes to a terminal only."""
    from flatout.errors import MachineError
    from flatout.machine.kept_ceilings import load_ceilings, save_ceilings
    from flatout.machine.measured_peaks import measure_ceilings

    terminal = sys.stderr.isatty()

    def show(what: str) -> None:
        if terminal:
            print(f"\r\x1b[Kmeasuring {what}", end="", file=sys.stderr, flush=True)

    try:
        ceilings = measure_ceilings(machine, quick=quick, progress=show)
    finally:
        if terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    if ceilings.contended:
        print("warning: others competed for the processor; of each ceiling the highest yet is kept", file=sys.stderr)
    try:
        save_ceilings(machine, ceilings)
    except MachineError as error:  # what was measured is worth showing even where it cannot be kept
        print(f"warning: {error}", file=sys.stderr)
        return machine.with_ceilings(ceilings)
    return machine.with_ceilings(load_ceilings(machine))
