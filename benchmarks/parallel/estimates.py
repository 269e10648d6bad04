"""What training takes on clusters that are not here: seconds and bytes by strategy, from a model of their costs.

compute        the operations of a rank's share of the batch, at the speed that one rank reaches
communication  `flatout.parallel.communication_costs`; with tensor-parallel ranks, which share each layer of a
               machine, what these exchange is exposed
update         the optimizer's traffic with the device's memory

Assumed: communication overlaps with compute wherever the strategy allows it, and slows neither down; a rank reaches the
same FLOP/s whatever the size of its share; tensor-parallel ranks hold equal parts of weights and activations (sequence
parallel).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from flatout.arguments import as_whole_number
from flatout.errors import UsageError
from flatout.parallel.communication_costs import Link, RankStep, Sharing, exchange, sent_bytes, where_time_goes
from flatout.units import format_bytes, format_seconds


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

    def __post_init__(self) -> None:
        for name in ("ranks", "ranks_per_machine", "memory_bytes"):
            as_whole_number(getattr(self, name), name)
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
        for link in (self.within, self.between):
            if link is not None:
                _check_number("latency_seconds", link.latency_seconds, zero=True)
                _check_number("bytes_per_second", link.bytes_per_second)
        if self.machines > 1 and self.between is None:
            raise UsageError(
                f"{self.machines} machines, and no link between them", limit="ranks send gradients over it"
            )
        if self.own_ranks > 1 and self.within is None:
            raise UsageError("several ranks on a machine, and no link within it", limit="ranks send gradients over it")

    @property
    def machines(self) -> int:
        return -(-self.ranks // self.ranks_per_machine)

    @property
    def own_ranks(self) -> int:
        """Of each machine."""
        return min(self.ranks, self.ranks_per_machine)

    def group(self, *, every: int = 1) -> ClusterGroup:
        """Of all ranks, or every so many of them: the ranks that share the data where a machine's ranks, `every` at a
        time, share the model."""
        return ClusterGroup(cluster=self, machines=self.machines, per_machine=self.own_ranks // every)

    def part_of_a_machine(self, ranks: int) -> ClusterGroup:
        return ClusterGroup(cluster=self, machines=1, per_machine=ranks)


@dataclass(frozen=True, kw_only=True)
class ClusterGroup:
    """Ranks that send to one another: as many on each of some machines. Used as a `communication_costs.Group` is.

    A ring sends (n-1)/n of the bytes over each of its links, and takes n-1 hops, of which one for each further machine
    is between machines. Where each rank of a machine has a network link of its own, as many rings run side by side as
    the group has ranks on a machine: the bandwidth between machines is that of all these links together. An all_reduce
    is a reduce_scatter followed by an all_gather, or goes up and down a tree where that is faster: that takes fewer
    hops, and sends a little more.
    """

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


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model and how it is trained, as far as its costs go. A sample is a row of the batch: an image, a sequence.

    Raises UsageError for figures that are out of range.
    """

    name: str
    parameters: int
    blocks: int
    """Repeated ones, which fsdp shards one by one."""
    block_parameters: int
    """Those of all blocks together."""
    flops_per_sample: float
    """Forward and backward; without what is computed again."""
    recomputed_flops_per_sample: float = 0.0
    activation_bytes_per_sample: float
    """What is kept from the forward for the backward pass."""
    transient_bytes_per_sample: float = 0.0
    """What is there besides at the start of the backward pass: of logits and their gradients."""
    parameter_bytes: int = 4
    """Of one parameter, as it is kept."""
    compute_bytes: int = 4
    """In the dtype of products; where that is smaller, a copy of every parameter is kept during the step (autocast)."""
    gathered_bytes: int | None = None
    """In the dtype in which fsdp gathers them; None: as they are kept."""
    gradient_bytes: int = 4
    """As it is sent."""
    optimizer_bytes: int = 8
    """The state of one parameter: 8 for the two moments of Adam in fp32."""
    hidden_bytes_per_sample: float | None = None
    """Of a block's output, which tensor-parallel ranks exchange; None: the model is not split like that."""
    tensor_all_reduces_per_block: float = 4
    """In forward and backward pass; an all_gather or reduce_scatter counts as half of one."""
    heads: int | None = None
    """The number of tensor-parallel ranks divides it."""

    def __post_init__(self) -> None:
        for name in ("parameters", "blocks", "parameter_bytes", "compute_bytes", "gradient_bytes"):
            as_whole_number(getattr(self, name), name)
        for name in ("optimizer_bytes", "block_parameters"):
            as_whole_number(getattr(self, name), name, least=0)
        if self.block_parameters > self.parameters:
            raise UsageError(
                f"block_parameters is {self.block_parameters}", limit=f"the model has {self.parameters} parameters"
            )
        for name in ("gathered_bytes", "heads"):
            if getattr(self, name) is not None:
                as_whole_number(getattr(self, name), name)
        if not self.flops_per_sample > 0 or not math.isfinite(self.flops_per_sample):
            raise UsageError(f"flops_per_sample is {self.flops_per_sample!r}", limit="it is above 0, and finite")
        for name in (
            "recomputed_flops_per_sample",
            "activation_bytes_per_sample",
            "transient_bytes_per_sample",
            "hidden_bytes_per_sample",
            "tensor_all_reduces_per_block",
        ):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise UsageError(f"{name} is {value!r}", limit="it is 0 or more, and finite")


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """One strategy, computed."""

    sharing: Sharing
    tensor_ranks: int
    """1: no layer is split."""
    replicas: int
    """Groups of `tensor_ranks` ranks; each has its share of the batch."""
    samples_per_replica: int
    compute_seconds: float
    communication_seconds: float
    """All of it, hidden or not."""
    exposed_seconds: float
    update_seconds: float
    """The optimizer's; 0 where the bandwidth of the memory is not known."""
    communication_bytes: int
    """Sent by one rank in a step."""
    memory: Mapping[str, int]
    """By category, of one rank, at the peak."""
    peak_at: str
    memory_bytes: int
    """What a rank has."""

    @property
    def name(self) -> str:
        return self.sharing if self.tensor_ranks == 1 else f"tensor {self.tensor_ranks} x {self.sharing}"

    @property
    def step_seconds(self) -> float:
        return self.compute_seconds + self.exposed_seconds + self.update_seconds

    @property
    def samples_per_second(self) -> float:
        """Of all ranks together."""
        return self.replicas * self.samples_per_replica / self.step_seconds

    @property
    def peak_bytes(self) -> int:
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.memory_bytes

    @property
    def reason(self) -> str:
        """What decides: the memory that is missing, or where the time goes."""
        if not self.fits:
            largest = max(self.memory, key=lambda name: self.memory[name])
            needed = f"needs {format_bytes(self.peak_bytes)} of {format_bytes(self.memory_bytes)}"
            return f"{needed}, {format_bytes(self.memory[largest])} of it for {largest}"
        return self.reason_of_time

    @property
    def reason_of_time(self) -> str:
        """Where the time goes."""
        found = where_time_goes(self.compute_seconds, self.communication_seconds, self.exposed_seconds)
        return f"{found}, update {format_seconds(self.update_seconds)}" if self.update_seconds else found

    def to_json(self) -> dict[str, object]:
        derived = ("name", "step_seconds", "samples_per_second", "peak_bytes", "fits", "reason")
        return {**asdict(self), "memory": dict(self.memory), **{name: getattr(self, name) for name in derived}}


def estimate(
    workload: Workload, cluster: Cluster, batch_size: int, sharing: Sharing, *, tensor_ranks: int = 1
) -> Estimate:
    """One strategy's seconds and bytes, whether it fits or not.

    tensor_ranks: over how many ranks of a machine each layer is split. Raises UsageError where the model or the batch
    cannot be shared like that.
    """
    as_whole_number(batch_size, "batch_size")
    refusal = _refusal(workload, cluster, batch_size, tensor_ranks)
    if refusal:
        raise UsageError(refusal, remedy="choose another batch size or number of ranks")
    replicas = cluster.group(every=tensor_ranks)
    samples = batch_size // replicas.ranks
    part = _Part(workload, cluster, replicas, samples, tensor_ranks)
    exchanged_seconds, exposed_seconds = exchange(sharing, part.step, replicas)
    tensor_seconds, tensor_bytes = part.tensor()
    memory, peak_at = part.memory(sharing)
    return Estimate(
        sharing=sharing,
        tensor_ranks=tensor_ranks,
        replicas=replicas.ranks,
        samples_per_replica=samples,
        compute_seconds=part.step.forward_seconds + part.step.backward_seconds,
        communication_seconds=exchanged_seconds + tensor_seconds,
        exposed_seconds=exposed_seconds + tensor_seconds,
        update_seconds=part.update_seconds(sharing),
        communication_bytes=round(part.sent_bytes(sharing) + tensor_bytes),
        memory={name: round(value) for name, value in memory.items()},
        peak_at=peak_at,
        memory_bytes=cluster.memory_bytes,
    )


def _refusal(workload: Workload, cluster: Cluster, batch_size: int, tensor_ranks: int) -> str:
    """Why the ranks cannot share the work like that; '' if they can."""
    own = cluster.own_ranks
    if tensor_ranks != 1:
        if tensor_ranks < 1 or own % tensor_ranks:
            return f"{tensor_ranks} does not divide the {own} ranks of a machine"
        if workload.hidden_bytes_per_sample is None:
            return "it is not known how the model's layers are split"
        if workload.heads is not None and workload.heads % tensor_ranks:
            return f"{tensor_ranks} does not divide the model's {workload.heads} heads"
    replicas = cluster.ranks // tensor_ranks
    if batch_size % replicas:
        return f"a batch of {batch_size} is not divisible by {replicas} replicas"
    return ""


class _Part:
    """What one rank does in a step."""

    def __init__(
        self, workload: Workload, cluster: Cluster, group: ClusterGroup, samples: int, tensor_ranks: int
    ) -> None:
        self._workload, self._cluster, self._group = workload, cluster, group
        self._tensor_ranks, self._samples = tensor_ranks, samples
        speed = cluster.flops_per_second * tensor_ranks / samples
        again = workload.recomputed_flops_per_sample
        self.step = RankStep(
            parameters=workload.parameters / tensor_ranks,
            blocks=workload.blocks,
            block_parameters=workload.block_parameters / tensor_ranks,
            forward_seconds=workload.flops_per_sample / 3 / speed,  # a backward pass has twice as many operations
            backward_seconds=(workload.flops_per_sample * 2 / 3 + again) / speed,
            parameter_bytes=workload.parameter_bytes,
            gathered_bytes=workload.gathered_bytes,
            gradient_bytes=workload.gradient_bytes,
        )
        self._parameters = self.step.parameters
        self._block = self.step.block_parameters / workload.blocks
        self._rest = self._parameters - self.step.block_parameters
        """Parameters outside of blocks: embeddings, the head."""
        self._gathered_bytes = workload.gathered_bytes or workload.parameter_bytes

    def sent_bytes(self, sharing: Sharing) -> float:
        """By this rank, without what tensor-parallel ranks exchange."""
        work, ranks, parameters = self._workload, self._group.ranks, self._parameters
        if sharing == "fsdp":
            blocks = self.step.block_parameters * (2 * self._gathered_bytes + work.gradient_bytes)
            return sent_bytes(ranks, blocks + self._rest * (self._gathered_bytes + work.gradient_bytes))
        gradients = 2 * sent_bytes(ranks, parameters * work.gradient_bytes)
        return gradients + (sent_bytes(ranks, parameters * work.parameter_bytes) if sharing == "zero1" else 0.0)

    def tensor(self) -> tuple[float, float]:
        """(seconds, bytes sent) of what the ranks that share layers exchange."""
        work, ranks = self._workload, self._tensor_ranks
        if ranks == 1:
            return 0.0, 0.0
        size = (work.hidden_bytes_per_sample or 0.0) * self._samples
        group = self._cluster.part_of_a_machine(ranks)
        times = work.blocks * work.tensor_all_reduces_per_block
        each = group.all_gather_seconds(size) + group.reduce_scatter_seconds(size)
        return times * each, times * 2 * sent_bytes(ranks, size)

    def update_seconds(self, sharing: Sharing) -> float:
        """Parameters and state are read and written, gradients read."""
        if self._cluster.memory_bytes_per_second is None:
            return 0.0
        work = self._workload
        own = self._parameters if sharing == "ddp" else self._parameters / self._group.ranks
        traffic = 2 * (work.parameter_bytes + work.optimizer_bytes) + work.gradient_bytes
        return own * traffic / self._cluster.memory_bytes_per_second

    def memory(self, sharing: Sharing) -> tuple[dict[str, float], str]:
        """By category at the peak, and when that is.

        DDP's buckets stay from step to step. Of sharded gradients, those of a block are there once its backward pass
        is over, when its activations are gone.
        """
        work, ranks = self._workload, self._group.ranks
        kept_bytes = self._parameters * work.parameter_bytes / (ranks if sharing == "fsdp" else 1)
        held = {
            "weights": kept_bytes,
            "optimizer": self._parameters * work.optimizer_bytes / (1 if sharing == "ddp" else ranks),
        }
        used = self._gathered_bytes if sharing == "fsdp" else work.parameter_bytes
        copied = self._parameters * work.compute_bytes if work.compute_bytes < used else 0.0
        activations = {
            "activations": work.activation_bytes_per_sample * self._samples / self._tensor_ranks,
            "temporaries": work.transient_bytes_per_sample * self._samples / self._tensor_ranks + copied,
        }
        gradients = {"gradients": kept_bytes}
        if sharing != "fsdp":
            return {**held, **gradients, **activations}, "the start of the backward pass"
        gathered = (min(2, work.blocks) * self._block + self._rest) * self._gathered_bytes
        start = {**held, **activations, "gathered": gathered}
        scattered = self._block * (self._gathered_bytes + work.gradient_bytes)
        end = {**held, **gradients, "temporaries": copied, "gathered": gathered + scattered}
        if sum(start.values()) >= sum(end.values()):
            return start, "the start of the backward pass"
        return end, "the end of the backward pass"


def _check_number(name: str, value: object, *, zero: bool = False) -> None:
    number = not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value)
    if not number or not (value > 0 or (zero and value == 0)):
        raise UsageError(f"{name} is {value!r}", limit=f"it is a finite number {'of at least' if zero else 'above'} 0")
