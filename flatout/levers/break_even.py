"""Does a start-up cost pay off? 'compile costs 61 s and saves 0.1 s a step: pays off after 610 steps'."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flatout.units import counted as number_of
from flatout.units import format_seconds

NEGLIGIBLE_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class Counted:
    """What is counted, in the words of reports."""

    unit: str = "steps"
    unknown: str = "how many the script runs is unknown; give --steps"
    known: str = "the script runs"


def payoff_steps(startup_seconds: float, baseline_seconds: float, candidate_seconds: float) -> int | None:
    """Steps after which the start-up cost is earned back; None where it is negligible, or nothing is saved."""
    saved = baseline_seconds - candidate_seconds
    if startup_seconds < NEGLIGIBLE_SECONDS or saved <= 0:
        return None
    return math.ceil(startup_seconds / saved)


def pays(payoff: int | None, total_steps: int | None) -> bool:
    """An unknown length counts as long enough: the report shows the payoff, so that the user can judge."""
    return payoff is None or total_steps is None or payoff < total_steps


def describe(
    startup_seconds: float, payoff: int | None, total_steps: int | None, counted: Counted | None = None
) -> str:
    """The sentence in a report; '' where the start-up cost is negligible."""
    if payoff is None:
        return ""
    counted = counted or Counted()
    after = number_of(payoff, counted.unit.removesuffix("s"))
    text = f"{format_seconds(startup_seconds)} to start, pays off after {after}"
    if total_steps is None:
        return f"{text} ({counted.unknown})"
    return text if payoff < total_steps else f"{text}, but {counted.known} {total_steps:,}"
