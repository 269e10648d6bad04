"""This machine together with its ceilings, which are measured first if they are not known."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from flatout.errors import MachineError
from flatout.machine.description import Machine
from flatout.machine.detect import detect
from flatout.machine.kept_ceilings import load_ceilings, save_ceilings
from flatout.machine.measured_peaks import measure_ceilings


def machine_with_ceilings(progress: Callable[[str], None]) -> Machine:
    """The machine, its ceilings measured quickly (a few seconds) if none are known, or only contended ones."""
    machine = detect()
    if machine.ceilings is not None and not machine.ceilings.contended:
        return machine
    try:
        ceilings = measure_ceilings(machine, quick=True, progress=lambda what: progress(f"ceilings: {what}"))
    except MachineError:
        return machine
    with contextlib.suppress(MachineError):
        save_ceilings(machine, ceilings)
        ceilings = load_ceilings(machine) or ceilings  # with what was reached before
    return machine.with_ceilings(ceilings)
