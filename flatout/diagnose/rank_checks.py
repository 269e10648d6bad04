"""Ranks that train together: does one hold the others up, and does communication?"""

from __future__ import annotations

from flatout.diagnose.check import Seen, check
from flatout.diagnose.facts import Facts
from flatout.script.rank_balance import RankBalance, rank_balance
from flatout.units import format_seconds

LEAST_STRAGGLER_SHARE, LEAST_EXPOSED_SHARE = 0.1, 0.1
"""Of a step. Ranks are never quite alike, and some communication is never overlapped: the last gradients are there when
the backward pass has ended."""
COMPUTES_MORE = (
    "look at its batches and its device: larger batches or longer sequences than on the other ranks, a slower device, "
    "processes that share it"
)
REMEDIES = {
    "data": "look at what its loader does: its share of the data, its workers, the disk that it reads from",
    "transfer": "look at how its batches get to its device: pinned memory, and which cores its process may use",
    "forward": COMPUTES_MORE,
    "backward": COMPUTES_MORE,
    "optimizer": "look at which parameters its optimizer holds, and at what else uses its device",
    "other": "look at what the script does on that rank alone in each step: logging, metrics, writing files",
}


def _balance(facts: Facts) -> RankBalance | None:
    return None if facts.run is None else rank_balance(facts.run.ranks)


@check(
    means="One rank takes longer for its own work in each step, and the others wait for it.",
    needs="the waits of all ranks were timed; its excess is a tenth of a step or more, beyond what steps vary by and "
    "in most of them, and the others wait longer than it does",
    if_wrong="ranks that take turns at being slow are slow on average",
)
def straggler(facts: Facts) -> Seen | None:
    found = _balance(facts)
    if found is None or not found.certain or not found.step_seconds:
        return None
    share = found.excess_seconds / found.step_seconds
    if share < LEAST_STRAGGLER_SHARE:
        return None
    own, others = format_seconds(found.own_seconds), format_seconds(found.next_seconds)
    return Seen(
        title=f"the other ranks wait for {found.straggler} in each step",
        evidence=f"its own work takes {own} of a step, {others} on the next slowest; "
        f"{format_seconds(found.part_excess_seconds)} of the excess are in {found.part}; the others wait "
        f"{format_seconds(found.waited_seconds)} longer than it does",
        remedy=REMEDIES[found.part],
        certain=False,
        cost_seconds=found.excess_seconds,
        cost_share=share,
        command=_profile(facts),
    )


@check(
    means="Ranks wait for communication that no computation overlaps.",
    needs="the waits of all ranks were timed; the least of them, of the rank that the others wait for, is a tenth of a "
    "step or more",
    if_wrong="where ranks were watched in different steps, what they wait for each other in turns is in it",
)
def exposed_communication(facts: Facts) -> Seen | None:
    found = _balance(facts)
    if found is None or not found.step_seconds:
        return None
    share = found.exposed_seconds / found.step_seconds
    if share < LEAST_EXPOSED_SHARE:
        return None
    return Seen(
        title=f"ranks wait for communication: {share:.0%} of a step",
        evidence=f"the rank that waits least in each step waits {format_seconds(found.exposed_seconds)} of "
        f"{format_seconds(found.step_seconds)} in collectives, and computes nothing meanwhile",
        remedy="exchange less often or less: larger batches on each rank, several micro-batches a step under no_sync, "
        "gradients in 16 bits; and measure what lies between the ranks",
        certain=False,
        cost_seconds=found.exposed_seconds,
        cost_share=share,
        command=_check_network(facts),
    )


def _check_network(facts: Facts) -> str | None:
    ranks = facts.run.ranks if facts.run is not None else ()
    count = max((one.ranks or 1 for one in ranks), default=1)
    return f"flatout launch --check --nproc-per-node {count}"


def _profile(facts: Facts) -> str | None:
    if facts.profile is not None:
        return None
    devices = facts.run.devices if facts.run is not None else None
    options = f" --devices {devices}" if devices is not None else ""
    return f"flatout profile{options} {facts.command}" if facts.command else None
