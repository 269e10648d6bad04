"""A lever that saves memory: how much, and whether it is kept although it makes nothing faster.

It is kept where it was asked for (a plan being verified names it) or where memory is short. Otherwise it is dropped,
and the report shows the saving and the plan line that asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flatout.levers.lever import Choice
from flatout.machine.description import Machine
from flatout.plan_document import line
from flatout.script.trial.answers import Peak
from flatout.search.trial import Outcome
from flatout.units import format_bytes

SMALLEST_SHARE = 0.05
"""Of a step's peak: the least saving for which a lever is kept."""
SHORT_SHARE = 0.85
"""Of all memory: beyond this, memory is short."""


@dataclass(frozen=True, kw_only=True)
class MemoryGain:
    """The peaks of two steps, without and with a choice."""

    before: Peak
    after: Peak

    @property
    def saved_share(self) -> float | None:
        """Share of the peak before; None where either is unknown."""
        if not self.before.peak_bytes or self.after.peak_bytes is None:
            return None
        return 1 - self.after.peak_bytes / self.before.peak_bytes


def judge_gain(gain: MemoryGain, choice: Choice, machine: Machine, device: str, *, asked: bool) -> tuple[Outcome, str]:
    """(outcome, reason) of a choice that is not faster."""
    incidents: Mapping[str, str] = gain.after.incidents
    if choice.lever.name in incidents:
        return "dropped", incidents[choice.lever.name]
    share = gain.saved_share
    if share is not None and share < SMALLEST_SHARE:
        return "dropped", "saves hardly any memory"
    if asked:
        return "kept", "asked for, to save memory"
    shortage = _shortage(gain.before, machine, device)
    if shortage:
        return "kept", shortage
    return "dropped", f"not faster; to save memory, put {line(choice.field, choice.value)} under [plan]"


def _shortage(plain: Peak, machine: Machine, device: str) -> str:
    """Why memory counts as short; '' where it does not, or that is unknown."""
    if device.startswith("cuda"):
        gpu = machine.gpu(device)
        total, held = gpu.memory_total_bytes if gpu is not None else None, plain.peak_bytes
    else:
        total, held = machine.memory_total_bytes, plain.resident_bytes
    if not total or held is None or held < SHORT_SHARE * total:
        return ""
    return f"memory is short: {format_bytes(held)} of {format_bytes(total)} are taken without it"
