"""What training takes on ranks that need not be here: seconds and bytes by strategy, from a model of their costs.

    compute        the operations of a rank's share of the batch, at the speed that one rank reaches
    communication  hops * latency + bytes / bandwidth (flatout.parallel.cluster), and how much of it is exposed: not
                   hidden behind compute
    update         the optimizer's traffic with the device's memory

What is taken to overlap is what each strategy makes possible, in full:

    ddp     a bucket's all_reduce runs while earlier layers' gradients are computed; the last one is exposed
    zero1   the same; the updated parameters are sent after the update, exposed
    fsdp    a block's parameters are gathered while the block before it computes, its gradients are scattered while the
            next one does; the first gather and the last scatter are exposed
    tensor  the ranks of a machine share each layer: what they exchange is exposed; the replicas share data as above

Not in the model: compute that slows down beside communication, smaller products that reach less, stragglers, data
loading. An estimate is therefore a little optimistic; benchmarks/parallel/planning.py compares it with published runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from flatout.errors import UsageError
from flatout.parallel.cluster import Cluster, Group, sent_bytes
from flatout.units import format_bytes, format_seconds

Sharing = Literal["ddp", "zero1", "fsdp"]
BUCKET_BYTES = 25 << 20
"""Of gradients that DDP sends together."""
ASSUMPTIONS = (
    "communication overlaps with compute wherever the strategy allows it, and slows neither down",
    "a rank reaches the same FLOP/s whatever the size of its share",
    "tensor: the ranks of a group hold equal parts of weights and activations (sequence parallel)",
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
            _check(name, getattr(self, name), least=1)
        _check("optimizer_bytes", self.optimizer_bytes)
        _check("block_parameters", self.block_parameters)
        if self.block_parameters > self.parameters:
            raise UsageError(
                f"block_parameters is {self.block_parameters}", limit=f"the model has {self.parameters} parameters"
            )
        for name in ("gathered_bytes", "heads"):
            if getattr(self, name) is not None:
                _check(name, getattr(self, name), least=1)
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

    def to_json(self) -> dict[str, object]:
        return asdict(self)


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
        parts = [f"compute {format_seconds(self.compute_seconds)}"]
        if self.communication_seconds:
            hidden = 1 - self.exposed_seconds / self.communication_seconds
            exposed = f"{format_seconds(self.exposed_seconds)} of communication exposed"
            parts.append(f"{exposed} ({max(hidden, 0.0):.0%} hidden)")
        if self.update_seconds:
            parts.append(f"update {format_seconds(self.update_seconds)}")
        return ", ".join(parts)

    def to_json(self) -> dict[str, object]:
        derived = ("name", "step_seconds", "samples_per_second", "peak_bytes", "fits", "reason")
        return {**asdict(self), "memory": dict(self.memory), **{name: getattr(self, name) for name in derived}}


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A strategy that cannot be used."""

    name: str
    reason: str
    estimate: Estimate | None = None
    """None: there is nothing to compute."""

    def to_json(self) -> dict[str, object]:
        return {"name": self.name, "reason": self.reason, "estimate": self.estimate and self.estimate.to_json()}


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """Strategies for one workload on one cluster, the fastest first."""

    workload: Workload
    cluster: Cluster
    batch_size: int
    """Samples of all ranks in a step."""
    fitting: tuple[Estimate, ...]
    left_out: tuple[LeftOut, ...]
    assumptions: tuple[str, ...] = ASSUMPTIONS

    def to_json(self) -> dict[str, object]:
        return {
            "workload": self.workload.to_json(),
            "cluster": self.cluster.to_json(),
            "batch_size": self.batch_size,
            "fitting": [one.to_json() for one in self.fitting],
            "left_out": [one.to_json() for one in self.left_out],
            "assumptions": list(self.assumptions),
        }


def rank_strategies(workload: Workload, cluster: Cluster, batch_size: int) -> Ranking:
    """Estimate every strategy: ddp, zero1 and fsdp over all ranks, and with the layers split within each machine.

    batch_size: samples of all ranks in a step. Raises UsageError where it is no whole number above 0.
    """
    _check("batch_size", batch_size, least=1)
    fitting, left_out = [], []
    for sharing, tensor_ranks, reason in _strategies(workload, cluster, batch_size):
        name = sharing if tensor_ranks == 1 else f"tensor {tensor_ranks} x {sharing}"
        if reason:
            left_out.append(LeftOut(name=name, reason=reason))
            continue
        found = estimate(workload, cluster, batch_size, sharing, tensor_ranks=tensor_ranks)
        if found.fits:
            fitting.append(found)
        else:
            left_out.append(LeftOut(name=name, reason=found.reason, estimate=found))
    # Of two that are equally fast, the simpler one, which comes first.
    fitting.sort(key=lambda one: one.step_seconds)
    return Ranking(
        workload=workload, cluster=cluster, batch_size=batch_size, fitting=tuple(fitting), left_out=tuple(left_out)
    )


def estimate(
    workload: Workload, cluster: Cluster, batch_size: int, sharing: Sharing, *, tensor_ranks: int = 1
) -> Estimate:
    """One strategy's seconds and bytes, whether it fits or not.

    tensor_ranks: over how many ranks of a machine each layer is split. Raises UsageError where the model or the batch
    cannot be shared like that.
    """
    _check("batch_size", batch_size, least=1)
    refusal = _refusal(workload, cluster, batch_size, tensor_ranks)
    if refusal:
        raise UsageError(refusal, remedy="choose another batch size or number of ranks")
    replicas = cluster.group(every=tensor_ranks)
    samples = batch_size // replicas.ranks
    part = _Part(workload, cluster, replicas, samples, tensor_ranks)
    communicated, exposed, sent = {"ddp": part.ddp, "zero1": part.zero1, "fsdp": part.fsdp}[sharing]()
    tensor_seconds, tensor_bytes = part.tensor()
    memory, peak_at = part.memory(sharing)
    return Estimate(
        sharing=sharing,
        tensor_ranks=tensor_ranks,
        replicas=replicas.ranks,
        samples_per_replica=samples,
        compute_seconds=part.forward_seconds + part.backward_seconds,
        communication_seconds=communicated + tensor_seconds,
        exposed_seconds=exposed + tensor_seconds,
        update_seconds=part.update_seconds(sharing),
        communication_bytes=round(sent + tensor_bytes),
        memory={name: round(value) for name, value in memory.items()},
        peak_at=peak_at,
        memory_bytes=cluster.memory_bytes,
    )


def _strategies(workload: Workload, cluster: Cluster, batch_size: int) -> Iterator[tuple[Sharing, int, str]]:
    """(sharing, tensor-parallel ranks, why not), the simplest first."""
    degrees = [1] if cluster.ranks == 1 else [1, *_degrees(min(cluster.ranks, cluster.ranks_per_machine))]
    for tensor_ranks in degrees:
        reason = _refusal(workload, cluster, batch_size, tensor_ranks)
        sharings: tuple[Sharing, ...] = ("ddp", "zero1", "fsdp") if tensor_ranks == 1 else ("ddp", "fsdp")
        if cluster.ranks == tensor_ranks:
            sharings = ("ddp",)  # there is one replica, and nothing to share
        for sharing in sharings:
            yield sharing, tensor_ranks, reason


def _degrees(own: int) -> list[int]:
    """Over how many of a machine's ranks a layer can be split."""
    return [count for count in range(2, own + 1) if own % count == 0]


def _refusal(workload: Workload, cluster: Cluster, batch_size: int, tensor_ranks: int) -> str:
    """Why the ranks cannot share the work like that; '' if they can."""
    own = min(cluster.ranks, cluster.ranks_per_machine)
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

    def __init__(self, workload: Workload, cluster: Cluster, group: Group, samples: int, tensor_ranks: int) -> None:
        self._workload, self._cluster, self._group = workload, cluster, group
        self._tensor_ranks, self._samples = tensor_ranks, samples
        self._parameters = workload.parameters / tensor_ranks
        self._block = workload.block_parameters / workload.blocks / tensor_ranks
        self._rest = self._parameters - self._block * workload.blocks
        """Parameters outside of blocks: embeddings, the head."""
        self._gathered_bytes = workload.gathered_bytes or workload.parameter_bytes
        speed = cluster.flops_per_second * tensor_ranks / samples
        self.forward_seconds = workload.flops_per_sample / 3 / speed  # a backward pass has twice as many operations
        self.backward_seconds = (workload.flops_per_sample * 2 / 3 + workload.recomputed_flops_per_sample) / speed

    # communication: (seconds, seconds exposed, bytes sent by this rank)

    def ddp(self) -> tuple[float, float, float]:
        size = self._parameters * self._workload.gradient_bytes
        sent = 2 * sent_bytes(self._group.ranks, size)
        buckets = math.ceil(size / BUCKET_BYTES)
        each = self._group.all_reduce_seconds(size / buckets)
        compute = self.backward_seconds / buckets
        # Two stages of which one works on a bucket while the other works on the next.
        exposed = compute + (buckets - 1) * max(compute, each) + each - self.backward_seconds
        return buckets * each, max(exposed, 0.0), sent

    def zero1(self) -> tuple[float, float, float]:
        """Each rank's updated parameters are broadcast, up to BUCKET_BYTES at a time."""
        seconds, exposed, sent = self.ddp()
        ranks = self._group.ranks
        size = self._parameters * self._workload.parameter_bytes
        packets = ranks * math.ceil(size / ranks / BUCKET_BYTES)
        broadcasts = packets * self._group.broadcast_seconds(size / packets)
        return seconds + broadcasts, exposed + broadcasts, sent + sent_bytes(ranks, size)

    def fsdp(self) -> tuple[float, float, float]:
        """A block's parameters are gathered in each pass; the rest's are kept from the forward to the backward pass."""
        work, group, blocks = self._workload, self._group, self._workload.blocks
        gather = group.all_gather_seconds(self._block * self._gathered_bytes)
        scatter = group.reduce_scatter_seconds(self._block * work.gradient_bytes)
        around = group.all_gather_seconds(self._rest * self._gathered_bytes) + group.reduce_scatter_seconds(
            self._rest * work.gradient_bytes
        )
        forward, backward = self.forward_seconds / blocks, self.backward_seconds / blocks
        last = blocks - 1
        beside_forward = [gather if number < last else 0.0 for number in range(blocks)]
        beside_backward = [
            (gather if number < last else 0.0) + (scatter if number else 0.0) for number in range(blocks)
        ]
        exposed = around + 2 * gather + scatter
        exposed += sum(max(0.0, seconds - forward) for seconds in beside_forward)
        exposed += sum(max(0.0, seconds - backward) for seconds in beside_backward)
        sent = blocks * self._block * (2 * self._gathered_bytes + work.gradient_bytes)
        sent += self._rest * (self._gathered_bytes + work.gradient_bytes)
        return around + blocks * (2 * gather + scatter), exposed, sent_bytes(group.ranks, sent)

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

    # the rest

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


def _check(name: str, value: object, *, least: int = 0) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{name} is {value!r}", limit=f"it is a whole number of at least {least}")
