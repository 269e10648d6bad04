"""Does a start-up cost pay? 'compile costs 61 s and saves 0.1 s a step: pays off after 610 steps'."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flatout.units import format_seconds

NEGLIGIBLE_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class Counted:
    """What the cost is set against, in words."""

    unit: str = "steps"
    unknown: str = "how many the script runs is unknown; give --steps"
    known: str = "the script runs"


def payoff_steps(startup_seconds: float, baseline_seconds: float, candidate_seconds: float) -> int | None:
    """Steps after which the start-up is earned back; None where there is none to speak of, or nothing is saved."""
    saved = baseline_seconds - candidate_seconds
    if startup_seconds < NEGLIGIBLE_SECONDS or saved <= 0:
        return None
    return math.ceil(startup_seconds / saved)


def pays(payoff: int | None, total_steps: int | None) -> bool:
    """Unknown length counts as long enough: the figure is shown, so that a person can judge."""
    return payoff is None or total_steps is None or payoff < total_steps


def describe(
    startup_seconds: float, payoff: int | None, total_steps: int | None, counted: Counted | None = None
) -> str:
    """The sentence a person reads; '' where there is no start-up cost to speak of."""
    if payoff is None:
        return ""
    counted = counted or Counted()
    text = f"{format_seconds(startup_seconds)} to start, pays off after {payoff:,} {counted.unit}"
    if total_steps is None:
        return f"{text} ({counted.unknown})"
    return text if payoff < total_steps else f"{text}, but {counted.known} {total_steps:,}"
