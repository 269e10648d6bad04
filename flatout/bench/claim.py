"""A figure that a guide states, what was measured for it here, and whether it holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from flatout.bench.results import OneMachine, Speedup
from flatout.bench.workload import Setup
from flatout.decoding import decode

Quantity = Literal["speedup", "slowdown", "memory", "rate", "share"]
"""Of what a claim states: times as fast, times as long, times as little memory, items a second, or a share of 1."""
Need = Literal["", "cuda", "two GPUs"]
Answer = Literal["yes", "more", "no", "undecided"]
"""Of one case: within the stated range, surely above it, surely below it; undecided: its interval has both."""
Verdict = Literal["holds", "holds in part", "undecided", "does not hold", "not measurable here"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One condition under which a claim was tried."""

    condition: str
    measured: Speedup
    """In the claim's quantity; a memory or a count that does not vary has no interval."""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Statement:
    """What a guide states, as a range of a quantity."""

    key: str
    says: str
    guides: tuple[str, ...]
    """Titles."""
    quantity: Quantity = "speedup"
    low: float
    """The least that still counts as what is stated: 1.8 for 'about 2x'."""
    high: float | None = None
    """The most; None: it is a lower bound."""
    unit: str = ""
    """Of a rate: what is counted, in the plural."""


@dataclass(frozen=True, kw_only=True)
class Claim(Statement):
    """A statement, and how it is measured."""

    needs: Need = ""
    packages: tuple[str, ...] = ()
    """That must be installed to measure it."""
    measure: Callable[[Setup, float], Sequence[Case]] | None = None
    """(where, seconds for each case) -> its cases; None: `why_not` says why nothing can be measured."""
    why_not: str = ""


@dataclass(frozen=True, kw_only=True)
class ClaimResult(Statement):
    """A statement, and what was measured for it."""

    cases: tuple[Case, ...]
    reason: str = ""
    """Why nothing was measured."""

    def answer(self, case: Case) -> Answer:
        """Does what was measured reach the stated range?"""
        found = case.measured
        least, most = (found.ratio if one is None else one for one in (found.low, found.high))
        if least >= self.low:
            return "more" if self.high is not None and least > self.high else "yes"
        return "undecided" if most >= self.low else "no"

    @property
    def verdict(self) -> Verdict:
        answers = {self.answer(case) for case in self.cases}
        if not answers:
            return "not measurable here"
        if answers <= {"yes", "more"}:
            return "holds"
        if answers & {"yes", "more"}:
            return "holds in part"
        return "undecided" if "undecided" in answers else "does not hold"


@dataclass(frozen=True, kw_only=True)
class ClaimsResult(OneMachine):
    """All claims."""

    claims: tuple[ClaimResult, ...]

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> ClaimsResult:
        """Raises TypeError for anything that `to_json` does not write."""
        return decode(cls, data)
