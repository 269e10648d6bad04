"""Which rank the others wait for, in which part of a step, and what communication costs besides.

Ranks that exchange tensors in every step take equally long for one. What differs is what each does between exchanges,
and so how long it waits: the rank that is last waits least. Its wait is what communication itself costs; what others
wait beyond that, they wait for it. Where it is the same rank in most steps, it is a straggler; where ranks take turns,
each waits for others in some of the steps.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from flatout.script.process_record import ProcessRecord, own_seconds, process_names

OWN_PARTS = ("data", "transfer", "forward", "backward", "optimizer", "other")
FULL_SHARE, TAKEN_AWAY_SECONDS = 0.9, 5e-3
"""Where no core is idle (or that is not known, after a short time), threads take turns of a few milliseconds: one that
carries out a collective takes the place of the one that computes, whose work then seems to take longer, and its wait
shorter."""
LEAST_COMMON_STEPS = 5
LEAST_TYPICAL_SHARE = 0.5
"""Of the excess of the slowest rank: so much of it has to be in a typical step."""
LEAST_WAITED_SHARE = 0.5
"""Of the excess of the slowest rank: so much of it the others have to wait longer than that one, or they do something
else meanwhile."""


@dataclass(frozen=True, kw_only=True)
class RankBalance:
    """Seconds are per step."""

    straggler: str
    """The rank with the most work of its own."""
    own_seconds: float
    """Its step without waiting for ranks or for the device."""
    next_seconds: float
    """The most of any other rank: with that, a step would take so much less."""
    part: str
    """Where it exceeds the others most."""
    part_excess_seconds: float
    """By so much: above the median of the others."""
    waited_seconds: float
    """How much longer the others wait than it does, on average."""
    exposed_seconds: float
    """How long the rank waits that waits least, in each step the one that does: for communication alone."""
    turns_seconds: float | None
    """How much longer the rank waits that waits least on average: now one is late, now another; None: no steps were
    watched on all ranks, and it is part of `exposed_seconds`."""
    imbalance: float
    """The most work of its own by the mean of all ranks; 1: all have the same."""
    step_seconds: float
    """The longest median step."""
    certain: bool
    """Is the excess beyond what the steps of each rank vary by, and do the others wait for it?"""

    @property
    def excess_seconds(self) -> float:
        return self.own_seconds - self.next_seconds

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "excess_seconds": self.excess_seconds}


def rank_balance(records: Sequence[ProcessRecord]) -> RankBalance | None:
    """Of those that train together. None: what fewer than two waited is known, or that of some of them is not."""
    ranks = [(name, one) for name, one in zip(process_names(records), records, strict=True) if one.ranks is not None]
    if len(ranks) < 2 or any(one.exposed_seconds is None or not one.parts for _, one in ranks):
        return None
    own = [own_seconds(one.parts) for _, one in ranks]
    order = sorted(range(len(ranks)), key=lambda place: own[place])
    first, second = order[-1], order[-2]
    others = [one for place, (_, one) in enumerate(ranks) if place != first]
    slowest, waits = ranks[first][1], [one.exposed_seconds or 0.0 for _, one in ranks]
    part, part_excess = _largest_excess(slowest, others)
    excess = own[first] - own[second]
    waited = statistics.fmean(one.exposed_seconds or 0.0 for one in others) - waits[first]
    crowded = any(one.busy_share is None or one.busy_share >= FULL_SHARE for _, one in ranks)
    sure = waited >= LEAST_WAITED_SHARE * excess and _is_beyond_scatter(slowest, ranks[second][1], excess)
    exposed, turns = _exposed([one for _, one in ranks])
    return RankBalance(
        straggler=ranks[first][0],
        own_seconds=own[first],
        next_seconds=own[second],
        part=part,
        part_excess_seconds=part_excess,
        waited_seconds=max(0.0, waited),
        exposed_seconds=exposed,
        turns_seconds=turns,
        imbalance=own[first] / (statistics.fmean(own) or 1.0),
        step_seconds=max(one.step_seconds or 0.0 for _, one in ranks),
        certain=sure and (not crowded or excess >= TAKEN_AWAY_SECONDS),
    )


def _exposed(ranks: Sequence[ProcessRecord]) -> tuple[float, float | None]:
    """(what communication alone costs, what the rank that waits least on average waits beyond that)."""
    least = min(one.exposed_seconds or 0.0 for one in ranks)
    waits = [dict(one.step_waits) for one in ranks]
    common = set.intersection(*(set(one) for one in waits))
    if len(common) < LEAST_COMMON_STEPS:
        return least, None
    alone = statistics.fmean(min(one[step] for one in waits) for step in common)
    return min(alone, least), max(0.0, least - alone)


def _is_beyond_scatter(slowest: ProcessRecord, following: ProcessRecord, excess: float) -> bool:
    """Of the steps of each, and in most of them: a few that something disturbed make no straggler."""
    errors = slowest.own_error_seconds, following.own_error_seconds
    typical = slowest.own_typical_seconds, following.own_typical_seconds
    if errors[0] is None or errors[1] is None or typical[0] is None or typical[1] is None:
        return False
    return excess > math.hypot(errors[0], errors[1]) and typical[0] - typical[1] >= LEAST_TYPICAL_SHARE * excess


def balance_unknown_because(records: Sequence[ProcessRecord]) -> str:
    """Why `rank_balance` is None; '' where there are no ranks to compare."""
    ranks = [one for one in records if one.ranks is not None]
    if len(ranks) < 2:
        return ""
    return next((one.exposed_unknown_because for one in ranks if one.exposed_seconds is None), "")


def _largest_excess(slowest: ProcessRecord, others: Sequence[ProcessRecord]) -> tuple[str, float]:
    """(part, seconds above the median of the others)."""

    def excess(part: str) -> float:
        return slowest.parts.get(part, 0.0) - statistics.median(one.parts.get(part, 0.0) for one in others)

    part = max(OWN_PARTS, key=excess)
    return part, excess(part)
