"""A Finding: what was seen, what it costs, what to do next. Checks return findings; reports print them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from flatout.decoding import decode
from flatout.script.behaviour_seen import SourceLine

Severity = Literal["note", "warning", "unusable"]
Confidence = Literal["certain", "likely"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """`unusable` stops all work, a `warning` costs speed or memory, a `note` is good to know.

    A cost that is not known is None: `evidence` then says what is.
    """

    name: str
    severity: Severity
    title: str
    evidence: str
    remedy: str
    next_command: str | None = None  # to be pasted into a shell
    cost_seconds: float | None = None  # a step
    cost_bytes: int | None = None
    cost_share: float | None = None  # of the step, or of the memory
    lines: tuple[SourceLine, ...] = ()
    """Of the script: where to look, the most important first."""
    confidence: Confidence = "certain"
    """'likely' where the evidence has another explanation, which `if_wrong` then allows for."""
    if_wrong: str = ""
    """What happens to someone who acts on a false alarm."""
    plan_change: Mapping[str, object] | None = None
    """Fields of a Plan that make the change without editing the script."""

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: object) -> Finding:
        return decode(cls, data)
