"""What a training step will hold at its peak, computed from a fake run: a value, and how it follows from a timeline.

On the CPU the forecast is the sum of the tensors alive. On CUDA the same events go through the rules of
the caching allocator, which rounds and caches: what counts there is what is reserved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from flatout.memory.allocator_settings import AllocatorSettings
from flatout.memory.caching_allocator import Block, CachingAllocator
from flatout.memory.timeline import CATEGORIES, TensorUse, Timeline, by_category
from flatout.notebook_tables import ShownAsText
from flatout.units import format_bytes

MOST_HOLDERS = 12


@dataclass(frozen=True, kw_only=True, repr=False)
class MemoryForecast(ShownAsText):
    """The peak of one training step, the steady one: gradients and the optimizer's state are there.

    `peak_bytes` is what the device must have: tensors on the CPU, reserved memory on CUDA. The categories add up to
    `tensor_bytes`; rounding and what is cached between blocks make up the rest.
    """

    device: str
    batch_size: int | None
    """Samples; of several ranks, those of this one's share."""
    peak_bytes: int
    tensor_bytes: int
    """Tensors alive at the peak."""
    categories: Mapping[str, int]
    """Bytes at the peak: weights, gradients, optimizer, inputs, activations, temporaries, workspaces."""
    rounding_bytes: int = 0
    """CUDA: blocks are multiples of 512 bytes."""
    cached_bytes: int = 0
    """CUDA: reserved and in no block, at the peak of what is reserved: free pieces between blocks."""
    offloaded_bytes: int = 0
    """CUDA: activations that a step moves to the host's memory, where there must be as much, and back."""
    phase: str
    """In which part of a step the peak is: forward, backward or optimizer; 'before' the first one, where each rank
    still has the whole model."""
    module: str
    line: str
    """The user's line that led to it: a line of the forward, where the peak is in its backward pass."""
    operation: str
    between_steps_bytes: int
    """Tensors held when a step has ended."""
    capacity_bytes: int | None = None
    largest: tuple[TensorUse, ...] = ()
    uncertainty: float
    """As a share: the measured peak is expected within peak_bytes * (1 -+ uncertainty)."""
    method: str = "fake run"
    not_covered: tuple[str, ...] = ()
    ranks: int = 1
    """How many train together; the forecast is of one that holds the most."""
    rank: int = 0
    """Which of them."""
    stages: tuple[int, ...] = ()
    """Of a pipeline: the first block of each rank, and the number of blocks."""
    not_in_force: tuple[tuple[str, str], ...] = ()
    """Choices of the plan that had no effect, and why."""
    seconds: float | None = field(default=None, compare=False)
    """What the forecast itself took."""

    @property
    def fits(self) -> bool | None:
        """Does the peak, at the upper end of its uncertainty, stay under the capacity? None if that is unknown."""
        if self.capacity_bytes is None:
            return None
        return self.peak_bytes * (1 + self.uncertainty) <= self.capacity_bytes

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "fits": self.fits}

    def __str__(self) -> str:
        parts = [f"{name} {format_bytes(size)}" for name, size in self.categories.items() if size]
        extra = [("rounding", self.rounding_bytes), ("cached", self.cached_bytes)]
        parts += [f"{name} {format_bytes(size)}" for name, size in extra if size]
        phase = "before the first step" if self.phase == "before" else f"in the {self.phase}"
        places = (phase, self.module and f"of {self.module}", self.line and f"at {self.line}")
        where = " ".join(part for part in places if part)
        batch = f"batch {self.batch_size}" if self.batch_size is not None else "this batch"
        of = f", rank {self.rank} of {self.ranks}" if self.ranks > 1 else ""
        if self.stages:
            begin, end = self.stages[self.rank : self.rank + 2]
            of += f" ({end - begin} of {self.stages[-1]} blocks, by counted work)"
        room = ""
        if self.capacity_bytes is not None:
            room = f" of {format_bytes(self.capacity_bytes)}, {'fits' if self.fits else 'does not fit'}"
        left_out = f"; not counted: {'; '.join(self.not_covered)}" if self.not_covered else ""
        off = "".join(f"; {name} is not in force: {why}" for name, why in self.not_in_force)
        away = f"; {format_bytes(self.offloaded_bytes)} offloaded to the host's memory" if self.offloaded_bytes else ""
        return (
            f"{batch} on {self.device}{of}: peak {format_bytes(self.peak_bytes)} ±{self.uncertainty:.0%}{room} = "
            f"{' + '.join(parts)}; {where}{away}{off}{left_out}"
        )


@dataclass(frozen=True, kw_only=True)
class Target:
    """The device that is forecast for."""

    name: str
    """'cpu', 'cuda:1', 'rtx-4090'; 'cuda' where no GPU is here."""
    cuda: bool
    capacity_bytes: int | None = None
    compute_capability: tuple[int, int] | None = None
    multiprocessors: int | None = None
    """CUDA: the buffers of reductions depend on it; None: not known."""
    settings: AllocatorSettings = field(default_factory=AllocatorSettings)


def forecast_of(
    timeline: Timeline,
    target: Target,
    *,
    batch_size: int | None,
    uncertainty: float,
    not_covered: Sequence[str],
    method: str = "fake run",
    device: str | None = None,
    seconds: float | None = None,
) -> MemoryForecast:
    """The forecast that a timeline of a few steps gives. `device`: count only tensors there ('cuda'); None: all."""
    peak = timeline.peak(device)
    alive = timeline.alive_at(peak.event, device)
    sums = by_category(alive)
    reserved = _reserved(timeline, target, device) if target.cuda else None
    rounding = cached = 0
    if reserved is not None:
        rounding = sum(-(-one.size_bytes // 512) * 512 - one.size_bytes for one in alive)
        cached = max(0, reserved - peak.size_bytes - rounding)
    cause = peak.allocation
    return MemoryForecast(
        device=target.name,
        batch_size=batch_size,
        peak_bytes=reserved if reserved is not None else peak.size_bytes,
        tensor_bytes=peak.size_bytes,
        categories={name: sums[name] for name in CATEGORIES},
        rounding_bytes=rounding,
        cached_bytes=cached,
        phase=cause.phase if cause else "forward",
        module=cause.module if cause else "",
        line=cause.line if cause else "",
        operation=cause.operation if cause else "",
        between_steps_bytes=list(timeline.totals(device))[-1] if timeline.events else 0,
        capacity_bytes=target.capacity_bytes,
        largest=tuple(TensorUse.of(one, one.category, one.operation) for one in alive[:MOST_HOLDERS]),
        uncertainty=uncertainty,
        method=method,
        not_covered=tuple(not_covered),
        seconds=seconds,
    )


def _reserved(timeline: Timeline, target: Target, device: str | None) -> int:
    """What the caching allocator reserves for these events, without a limit."""
    allocator = CachingAllocator(target.settings)
    blocks: dict[int, Block] = {}
    for index, born in timeline.events:
        one = timeline.allocations[index]
        if not one.size_bytes or (device is not None and one.device != device):
            continue
        if born:
            blocks[index] = allocator.allocate(one.size_bytes, one.stream)
        elif index in blocks:
            allocator.free(blocks.pop(index))
    return allocator.reserved_bytes
