"""What a step would take under each strategy: from the time of a step of one process, and what ranks exchange.

    ddp, zero1, fsdp   `flatout.parallel.planning`, with the measured time of a step in place of operations
    pipeline           each rank has its part of the step, and waits while the first and the last parts of a batch pass
    tensor             unknown: what the ranks exchange depends on the model's layers

On a CPU a rank has its share of the cores, and the step was timed with so many threads. Predictions decide which
strategy is tried first; none is left out for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flatout.errors import UsageError
from flatout.parallel.cluster import Cluster, Link
from flatout.parallel.planning import Sharing, Workload, estimate
from flatout.parallel.rank_timings import fit
from flatout.strategies.facts import TrainingFacts
from flatout.units import counted, format_seconds

UNIT = 1e12
"""Operations a second of a rank: any number does, as those of a sample are made of its time."""
Points = Mapping[str, Sequence[tuple[float, float]]]
"""Of each collective: (bytes, seconds)."""


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """A step of a strategy."""

    step_seconds: float
    reason: str


def cluster_of(points: Points, ranks: int) -> Cluster | None:
    """Equal ranks on this machine, by what an all_reduce took between them; None: that does not tell."""
    line = fit(points.get("all_reduce", ()))
    if line is None:
        return None
    hops, share = 2 * (ranks - 1), 2 * (ranks - 1) / ranks
    link = Link(latency_seconds=line.latency_seconds / hops, bytes_per_second=line.bytes_per_second * share)
    return Cluster(ranks=ranks, ranks_per_machine=ranks, flops_per_second=UNIT, memory_bytes=1, within=link)


def predictions(
    facts: TrainingFacts, cluster: Cluster | None, ranks: int, micro_batches: int | None
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
    if cluster is None:
        return found
    workload = Workload(
        name=facts.model,
        parameters=max(1, facts.parameters),
        blocks=max(1, facts.blocks),
        block_parameters=min(facts.block_parameters, facts.parameters),
        flops_per_sample=alone / facts.samples * UNIT,
        activation_bytes_per_sample=0.0,
        parameter_bytes=max(1, round(facts.parameter_bytes / max(1, facts.parameters))),
    )
    sharings: tuple[Sharing, ...] = ("ddp", "zero1", "fsdp")
    for sharing in sharings:
        try:
            one = estimate(workload, cluster, facts.samples, sharing)
        except UsageError:  # the batch is not divisible
            continue
        with_threads = "" if facts.rank_threads is None else f" with {counted(facts.rank_threads, 'thread')} a rank"
        found[sharing] = Predicted(step_seconds=one.step_seconds, reason=one.reason_of_time + with_threads)
    return found
