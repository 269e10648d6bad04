"""`flatout.check`: what this machine is, how fast it can be, and what is wrong with it.

found = flatout.check()
found.ok, found.problems, found.machine.cpu.name
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from flatout.diagnose.finding import Finding
from flatout.diagnose.machine_checks import check_machine, gather_facts
from flatout.errors import MachineError
from flatout.machine.description import Machine
from flatout.machine.detect import detect
from flatout.machine.kept_ceilings import load_ceilings, save_ceilings
from flatout.machine.measured_peaks import measure_ceilings
from flatout.notebook_tables import ShownAsText, table_html
from flatout.report.machine_text import check_text, exit_code, machine_line, verdict

CONTENDED = "others competed for the processor or the GPU; of each ceiling the highest yet is kept"


@dataclass(frozen=True, kw_only=True, repr=False)
class CheckResult(ShownAsText):
    """What `flatout.check` found."""

    machine: Machine
    findings: tuple[Finding, ...]
    """Notes too, which are good to know and no problem."""
    warnings: tuple[str, ...] = ()
    """What went wrong while the ceilings were measured."""

    @property
    def problems(self) -> tuple[Finding, ...]:
        """The findings that should be fixed."""
        return tuple(finding for finding in self.findings if finding.severity != "note")

    @property
    def ok(self) -> bool:
        """Is there nothing to fix?"""
        return not self.problems

    @property
    def exit_code(self) -> int:
        """As `flatout check` ends: 0 fine, 1 unusable, 2 something should be fixed."""
        return exit_code(self.findings)

    def summary(self) -> str:
        """What `flatout check` prints."""
        return check_text(self.machine, self.findings)

    def __str__(self) -> str:
        return self.summary()

    def _repr_html_(self) -> str:
        """In a notebook: the verdict, the machine and what was found."""
        rows = [("machine", machine_line(self.machine))]
        rows += [(one.severity, f"{one.title} ({one.evidence})") for one in self.findings]
        return table_html(f"Machine: {verdict(self.findings)}", rows)

    def to_json(self) -> dict[str, object]:
        return {
            "verdict": verdict(self.findings),
            "machine": self.machine.to_json(),
            "findings": [finding.to_json() for finding in self.findings],
        }


def check(*, measure: bool = False, quick: bool = False, progress: Callable[[str], None] | None = None) -> CheckResult:
    """Say what this machine is, what works, and what should be fixed.

    measure: measure its ceilings too, which takes half a minute, and keep them for later; quick: in a few seconds, less
    surely. A machine on which torch is unusable is not measured. progress: called with what is being measured.

    Returns a CheckResult: `machine`, `findings`, `problems`, `ok`, `summary()`.
    """
    machine = detect()
    found = CheckResult(machine=machine, findings=tuple(check_machine(machine, gather_facts())))
    if not measure or found.exit_code == 1:
        return found
    measured, warnings = _measured(machine, quick=quick, progress=progress or (lambda what: None))
    return replace(found, machine=measured, warnings=warnings)


def _measured(machine: Machine, *, quick: bool, progress: Callable[[str], None]) -> tuple[Machine, tuple[str, ...]]:
    """The machine with its ceilings, which are kept for the next time."""
    ceilings = measure_ceilings(machine, quick=quick, progress=progress)
    warnings = (CONTENDED,) if ceilings.contended else ()
    try:
        save_ceilings(machine, ceilings)
    except MachineError as error:  # what was measured is worth showing even where it cannot be kept
        return machine.with_ceilings(ceilings), (*warnings, str(error))
    return machine.with_ceilings(load_ceilings(machine)), warnings
