"""What can be wrong with a machine: pure functions of a Machine and a few facts, in one list.

>>> from flatout.machine.detect import detect
>>> from flatout.diagnose.machine_checks import check_machine, gather_facts
>>> findings = check_machine(detect(), gather_facts())
"""

from __future__ import annotations

from collections.abc import Callable

from flatout.diagnose.finding import Finding
from flatout.diagnose.machine_checks import gpus, host, torch_build
from flatout.diagnose.machine_checks.facts import Facts, gather_facts
from flatout.machine.description import Machine

__all__ = ["CHECKS", "Facts", "check_machine", "gather_facts"]

# First what makes everything else moot (no torch), then what keeps a GPU from being used at all, then what makes a
# usable GPU slow, then the host: the order in which to fix them.
CHECKS: tuple[Callable[[Machine, Facts], Finding | None], ...] = (
    torch_build.torch_missing,
    torch_build.torch_too_old,
    gpus.gpu_without_driver,
    torch_build.torch_for_cpu_only,
    torch_build.driver_too_old,
    torch_build.gpu_too_old,
    gpus.gpu_hidden,
    gpus.gpu_occupied,
    gpus.gpu_memory_low,
    host.threads_too_many,
    host.threads_too_few,
    host.compiler_missing,
    host.shared_memory_small,
    host.memory_low,
    host.cores_limited,
    host.machine_busy,
)


def check_machine(machine: Machine, facts: Facts) -> tuple[Finding, ...]:
    """Everything that is wrong, in the order of the list."""
    return tuple(finding for check in CHECKS if (finding := check(machine, facts)) is not None)
