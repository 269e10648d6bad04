"""What a step would take under each strategy: from the time of a step of one process, and what ranks exchange.

    ddp, zero1, fsdp   a rank's share of that time, and what `flatout.parallel.communication_costs` says of the exchange
    pipeline           each rank has its part of the step, and waits while the first and the last parts of a batch pass
    tensor             the same share, and every all_reduce of a step, which were counted; fsdp + tensor: of both

On a CPU a rank has its share of the cores, and the step was timed with so many threads. Predictions decide which
strategy is tried first; none is left out for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flatout.parallel.communication_costs import SHARINGS, Group, Link, RankStep, exchange, where_time_goes
from flatout.parallel.rank_timings import fit
from flatout.strategies.facts import FSDP_TENSOR, TrainingFacts, tensor_ranks_of
from flatout.units import counted, format_seconds

Points = Mapping[str, Sequence[tuple[float, float]]]
"""Of each collective: (bytes, seconds)."""


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """A step of a strategy."""

    step_seconds: float
    reason: str


def group_of(points: Points, ranks: int) -> Group | None:
    """Ranks of this machine, by what an all_reduce took between them; None: that does not tell."""
    line = fit(points.get("all_reduce", ()))
    if line is None:
        return None
    hops, share = 2 * (ranks - 1), 2 * (ranks - 1) / ranks
    link = Link(latency_seconds=line.latency_seconds / hops, bytes_per_second=line.bytes_per_second * share)
    return Group(ranks=ranks, link=link)


def predictions(
    facts: TrainingFacts, group: Group | None, ranks: int, micro_batches: int | None
) -> dict[str, Predicted]:
    """By strategy, those that can be predicted. micro_batches: of a pipeline; None: the plan allows none."""
    alone, found = facts.rank_step_seconds, {}
    if alone is None or not facts.samples:
        return {}
    if micro_batches is not None:
        waits = (micro_batches + ranks - 1) / micro_batches
        found["pipeline"] = Predicted(
            step_seconds=alone / ranks * waits,
            reason=f"1/{ranks} of the {format_seconds(alone)} of one process with a rank's threads, "
            f"and {waits - 1:.0%} of that to fill and drain the stages",
        )
    if group is None:
        return found
    with_threads = "" if facts.rank_threads is None else f" with {counted(facts.rank_threads, 'thread')} a rank"
    compute = alone / ranks
    for sharing in SHARINGS if not facts.samples % ranks else ():
        seconds, exposed = exchange(sharing, _rank_step(facts, compute), group)
        reason = where_time_goes(compute, seconds, exposed) + with_threads
        found[sharing] = Predicted(step_seconds=compute + exposed, reason=reason)
    for name, sizes in facts.all_reduced_bytes.items():
        seconds, exposed = _in_layers(facts, compute, group, name, sizes)
        reason = where_time_goes(compute, seconds, exposed) + with_threads
        found[name] = Predicted(step_seconds=compute + exposed, reason=reason)
    return found


def _rank_step(facts: TrainingFacts, compute: float, parts: int = 1) -> RankStep:
    """parts: how many ranks share each layer."""
    return RankStep(
        parameters=max(1, facts.parameters) / parts,
        blocks=max(1, facts.blocks),
        block_parameters=min(facts.block_parameters, facts.parameters) / parts,
        forward_seconds=compute / 3,  # a backward pass has twice as many operations
        backward_seconds=compute * 2 / 3,
        parameter_bytes=max(1, round(facts.parameter_bytes / max(1, facts.parameters))),
    )


def _in_layers(
    facts: TrainingFacts, compute: float, group: Group, name: str, all_reduced: Sequence[int]
) -> tuple[float, float]:
    """(seconds that ranks which share layers exchange, those not hidden): a layer waits for each all_reduce."""
    together = (tensor_ranks_of(group.ranks) if name == FSDP_TENSOR else None) or group.ranks
    within = Group(ranks=together, link=group.link)
    seconds = sum(within.all_reduce_seconds(size) for size in all_reduced)
    if together == group.ranks:
        return seconds, seconds
    across = Group(ranks=group.ranks // together, link=group.link)
    sharded, exposed = exchange("fsdp", _rank_step(facts, compute, together), across)
    return seconds + sharded, seconds + exposed
