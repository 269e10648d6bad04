"""Seconds that ranks of one machine take to exchange tensors: a collective, and what a strategy exchanges in a step.

What is taken to overlap is what each strategy makes possible, in full:

    ddp     a bucket's all_reduce runs while earlier layers' gradients are computed; the last one is exposed
    zero1   the same; the updated parameters are sent after the update, exposed
    fsdp    a block's parameters are gathered while the block before it computes, its gradients are scattered while the
            next one does; the first gather and the last scatter are exposed

Not in the model: compute that slows down beside communication, smaller products that reach less, stragglers, data
loading. An estimate is therefore a little optimistic; benchmarks/parallel/planning.py compares it with published runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from flatout.units import format_seconds

Sharing = Literal["ddp", "zero1", "fsdp"]
SHARINGS: tuple[Sharing, ...] = get_args(Sharing)
"""Strategies under which each rank takes its share of a batch."""
BUCKET_BYTES = 25 << 20
"""Of gradients that DDP sends together."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """What one rank can send to another one, in one direction."""

    latency_seconds: float
    """Of one hop."""
    bytes_per_second: float


@dataclass(frozen=True, kw_only=True)
class Group:
    """Ranks that send to one another along a ring. Each method gives the seconds of a collective on a tensor that has
    so many bytes as a whole."""

    ranks: int
    link: Link

    def all_gather_seconds(self, size_bytes: float) -> float:
        return self._seconds(sent_bytes(self.ranks, size_bytes))

    reduce_scatter_seconds = all_gather_seconds
    """The same hops the other way."""

    def broadcast_seconds(self, size_bytes: float) -> float:
        """In pieces: each link carries all of it once."""
        return self._seconds(size_bytes)

    def all_reduce_seconds(self, size_bytes: float) -> float:
        """A reduce_scatter followed by an all_gather."""
        return 2 * self.all_gather_seconds(size_bytes)

    def _seconds(self, each_link_bytes: float) -> float:
        if not each_link_bytes:
            return 0.0  # nothing is sent
        return (self.ranks - 1) * self.link.latency_seconds + each_link_bytes / self.link.bytes_per_second


def sent_bytes(ranks: int, size_bytes: float) -> float:
    """By each of so many ranks, in an all_gather or reduce_scatter of a tensor that has so many bytes as a whole."""
    return (ranks - 1) / ranks * size_bytes


@dataclass(frozen=True, kw_only=True)
class RankStep:
    """A step of one rank: what it computes of its share of the batch, and of how many parameters."""

    parameters: float
    blocks: int
    """Repeated ones, which fsdp shards one by one."""
    block_parameters: float
    """Those of all blocks together."""
    forward_seconds: float
    backward_seconds: float
    parameter_bytes: float = 4
    """Of one parameter, as it is kept."""
    gathered_bytes: float | None = None
    """In the dtype in which fsdp gathers them; None: as they are kept."""
    gradient_bytes: float = 4
    """As it is sent."""


def exchange(sharing: Sharing, step: RankStep, group: Group) -> tuple[float, float]:
    """(seconds that each rank of the group exchanges tensors in a step, those of them not hidden behind compute)"""
    return {"ddp": _ddp, "zero1": _zero1, "fsdp": _fsdp}[sharing](step, group)


def _ddp(step: RankStep, group: Group) -> tuple[float, float]:
    size = step.parameters * step.gradient_bytes
    buckets = math.ceil(size / BUCKET_BYTES)
    each = group.all_reduce_seconds(size / buckets)
    compute = step.backward_seconds / buckets
    # Two stages of which one works on a bucket while the other works on the next.
    exposed = compute + (buckets - 1) * max(compute, each) + each - step.backward_seconds
    return buckets * each, max(exposed, 0.0)


def _zero1(step: RankStep, group: Group) -> tuple[float, float]:
    """Each rank's updated parameters are broadcast, up to BUCKET_BYTES at a time."""
    seconds, exposed = _ddp(step, group)
    size = step.parameters * step.parameter_bytes
    packets = group.ranks * math.ceil(size / group.ranks / BUCKET_BYTES)
    broadcasts = packets * group.broadcast_seconds(size / packets)
    return seconds + broadcasts, exposed + broadcasts


def _fsdp(step: RankStep, group: Group) -> tuple[float, float]:
    """A block's parameters are gathered in each pass; the rest's are kept from the forward to the backward pass."""
    blocks, gathered, sent = step.blocks, step.gathered_bytes or step.parameter_bytes, step.gradient_bytes
    block = step.block_parameters / blocks
    rest = step.parameters - step.block_parameters
    gather, scatter = group.all_gather_seconds(block * gathered), group.reduce_scatter_seconds(block * sent)
    around = group.all_gather_seconds(rest * gathered) + group.reduce_scatter_seconds(rest * sent)
    forward, backward = step.forward_seconds / blocks, step.backward_seconds / blocks
    exposed = around + 2 * gather + scatter
    for number in range(blocks):
        next_gather = gather if number < blocks - 1 else 0.0
        exposed += max(0.0, next_gather - forward)
        exposed += max(0.0, next_gather + (scatter if number else 0.0) - backward)
    return around + blocks * (2 * gather + scatter), exposed


def where_time_goes(compute_seconds: float, exchanged_seconds: float, exposed_seconds: float) -> str:
    """In a step, in words."""
    compute = f"compute {format_seconds(compute_seconds)}"
    if not exchanged_seconds:
        return compute
    hidden = max(1 - exposed_seconds / exchanged_seconds, 0.0)
    return f"{compute}, {format_seconds(exposed_seconds)} of communication exposed ({hidden:.0%} hidden)"
