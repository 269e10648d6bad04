"""A Finding: what was seen, what it costs, what to do next. Checks return findings; reports print them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from flatout.decoding import decode

Severity = Literal["note", "warning", "unusable"]


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

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: object) -> Finding:
        return decode(cls, data)
