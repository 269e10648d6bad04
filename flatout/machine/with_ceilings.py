"""This machine together with its ceilings, measuring them first where nobody has."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from flatout.errors import MachineError
from flatout.machine.description import Machine
from flatout.machine.detect import detect
from flatout.machine.measured_peaks import measure_ceilings, save_ceilings


def machine_with_ceilings(progress: Callable[[str], None]) -> Machine:
    """The machine, its ceilings measured quickly if they are not known yet (a few seconds)."""
    machine = detect()
    if machine.ceilings is not None:
        return machine
    try:
        ceilings = measure_ceilings(machine, quick=True, progress=lambda what: progress(f"ceilings: {what}"))
    except MachineError:
        return machine
    with contextlib.suppress(MachineError):
        save_ceilings(machine, ceilings)
    return machine.with_ceilings(ceilings)
