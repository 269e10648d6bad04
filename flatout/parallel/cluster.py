"""Machines that need not be here: their ranks, links and speeds, and what a collective takes between those ranks.

A ring sends (n-1)/n of the bytes over each of its links, and takes n-1 hops, of which one for each further machine is
between machines. Where each rank of a machine has a network link of its own, as many rings run side by side as the
group has ranks on a machine: the bandwidth between machines is that of all these links together. An all_reduce is a
reduce_scatter followed by an all_gather, or goes up and down a tree where that is faster: that takes fewer hops, and
sends a little more.

    cluster = Cluster(ranks=64, ranks_per_machine=8, flops_per_second=3.8e14, memory_bytes=80 * 2**30,
                      within=Link(latency_seconds=3e-6, bytes_per_second=450e9),
                      between=Link(latency_seconds=14e-6, bytes_per_second=50e9))
    cluster.group().all_reduce_seconds(2**30)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from flatout.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Link:
    """What one rank can send to another one, in one direction.

    Raises UsageError where the latency is not finite, or the bandwidth not above 0.
    """

    latency_seconds: float
    """Of one hop."""
    bytes_per_second: float

    def __post_init__(self) -> None:
        _check_number("latency_seconds", self.latency_seconds, zero=True)
        _check_number("bytes_per_second", self.bytes_per_second)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal ranks on equal machines.

    Raises UsageError for figures that are not finite or below 0, ranks that do not fill their machines, and several
    machines without a link between them.
    """

    ranks: int
    ranks_per_machine: int
    flops_per_second: float
    """What one rank reaches on this kind of work, not the peak of a data sheet."""
    memory_bytes: int
    """What one rank can use."""
    within: Link | None = None
    """Between ranks of one machine; None: a machine has one rank."""
    between: Link | None = None
    """Between machines, of one rank; None: there is one machine."""
    memory_bytes_per_second: float | None = None
    """Of the device's memory, for the optimizer's update; None: the update is not counted."""
    start_seconds: float = 0.0
    """What any collective takes before it sends."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Of each figure: where it was measured or published."""

    def __post_init__(self) -> None:
        for name in ("ranks", "ranks_per_machine", "memory_bytes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UsageError(f"{name} is {value!r}", limit="it is a whole number of at least 1")
        if self.ranks > self.ranks_per_machine and self.ranks % self.ranks_per_machine:
            raise UsageError(
                f"{self.ranks} ranks, {self.ranks_per_machine} on a machine",
                limit="every machine has as many",
                remedy=f"describe {self.ranks - self.ranks % self.ranks_per_machine} ranks",
            )
        _check_number("flops_per_second", self.flops_per_second)
        _check_number("start_seconds", self.start_seconds, zero=True)
        if self.memory_bytes_per_second is not None:
            _check_number("memory_bytes_per_second", self.memory_bytes_per_second)
        if self.machines > 1 and self.between is None:
            raise UsageError(
                f"{self.machines} machines, and no link between them", limit="ranks send gradients over it"
            )
        if min(self.ranks, self.ranks_per_machine) > 1 and self.within is None:
            raise UsageError("several ranks on a machine, and no link within it", limit="ranks send gradients over it")

    @property
    def machines(self) -> int:
        return -(-self.ranks // self.ranks_per_machine)

    def group(self, *, every: int = 1) -> Group:
        """Of all ranks, or every so many of them: the ranks that share the data where a machine's ranks, `every` at a
        time, share the model."""
        own = min(self.ranks, self.ranks_per_machine)
        return Group(cluster=self, machines=self.machines, per_machine=own // every)

    def part_of_a_machine(self, ranks: int) -> Group:
        return Group(cluster=self, machines=1, per_machine=ranks)

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "sources": dict(self.sources), "machines": self.machines}


@dataclass(frozen=True, kw_only=True)
class Group:
    """Ranks that send to one another: as many on each of some machines. Each method gives the seconds of a collective
    on a tensor that has so many bytes as a whole."""

    cluster: Cluster
    machines: int
    per_machine: int

    @property
    def ranks(self) -> int:
        return self.machines * self.per_machine

    @property
    def bytes_per_second(self) -> float:
        """Over each link of a ring through all ranks."""
        rates = []
        if self.per_machine > 1 and self.cluster.within is not None:
            rates.append(self.cluster.within.bytes_per_second)
        if self.machines > 1 and self.cluster.between is not None:
            rates.append(self.per_machine * self.cluster.between.bytes_per_second)
        return min(rates, default=math.inf)

    def all_gather_seconds(self, size_bytes: float) -> float:
        return self._seconds(self._ring_seconds, sent_bytes(self.ranks, size_bytes))

    reduce_scatter_seconds = all_gather_seconds
    """The same hops the other way."""

    def broadcast_seconds(self, size_bytes: float) -> float:
        """Along a ring, in pieces: each link carries all of it once."""
        return self._seconds(self._ring_seconds, size_bytes)

    def all_reduce_seconds(self, size_bytes: float) -> float:
        ring = self._seconds(2 * self._ring_seconds, 2 * sent_bytes(self.ranks, size_bytes))
        return min(ring, self._seconds(2 * self._tree_seconds, 2 * size_bytes))

    def _seconds(self, latency_seconds: float, each_link_bytes: float) -> float:
        if not each_link_bytes or self.ranks == 1:
            return 0.0  # nothing is sent
        return self.cluster.start_seconds + latency_seconds + each_link_bytes / self.bytes_per_second

    @property
    def _ring_seconds(self) -> float:
        """The hops of a ring, one after the other."""
        return self._hops(self.ranks - self.machines, self.machines - 1)

    @property
    def _tree_seconds(self) -> float:
        """From a leaf of a tree to its root: a chain within each machine, a binary tree of the machines."""
        return self._hops(self.per_machine - 1, math.ceil(math.log2(self.machines)))

    def _hops(self, within: int, between: int) -> float:
        cluster = self.cluster
        return (within * cluster.within.latency_seconds if within and cluster.within else 0.0) + (
            between * cluster.between.latency_seconds if between and cluster.between else 0.0
        )


def sent_bytes(ranks: int, size_bytes: float) -> float:
    """By each of so many ranks, in an all_gather or reduce_scatter of a tensor that has so many bytes as a whole."""
    return (ranks - 1) / ranks * size_bytes


def _check_number(name: str, value: object, *, zero: bool = False) -> None:
    number = not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value)
    if not number or not (value > 0 or (zero and value == 0)):  # type: ignore[operator]  # it is a number
        raise UsageError(f"{name} is {value!r}", limit=f"it is a finite number {'of at least' if zero else 'above'} 0")
