"""What torch's profiler recorded, as plain values: events in a forest by thread, kernels, copies.

events = recorded(profiler.events())
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from torch.autograd.profiler_util import FunctionEvent

_BACKWARD_SCOPE = 1
"""torch's RecordScope::BACKWARD_FUNCTION."""
STEP = "Flatout step"
"""Label of a profiled step. Torch's own, 'ProfilerStep', is not enough: a script with a profiler labels its steps so
too, also while that records nothing."""
DISTURBED = 2.0
_EVALUATES = "autograd::engine::evaluate_function"
KernelKind = Literal["kernel", "copy", "set", "communication"]
Links = dict[tuple[str, int, str], int]
"""(kind of device, number, name) of an event -> number of the operator that it belongs to. Calls of CUDA's runtime are
numbered by another count than operators."""
_HOST_BACKENDS = ("gloo:", "mpi:", "ucc:")
_KINDS: tuple[tuple[KernelKind, tuple[str, ...]], ...] = (
    ("copy", ("Memcpy", "memcpy")),
    ("set", ("Memset", "memset")),
    ("communication", ("nccl",)),
)
"""How names of a kind begin."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One call on the host. Times in seconds since the profiler started."""

    name: str
    begin: float
    end: float
    parent: int | None = None
    """Its index; a parent stands before its children."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """Of its tensor arguments, without lists and scalars."""
    backward: bool = False
    """A node of autograd's backward pass."""
    annotation: bool = False
    """A label (`record_function`), no operator."""
    device_seconds: float = 0.0
    """Of the kernels that it launched itself."""

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """One piece of work of a GPU."""

    name: str
    begin: float
    end: float
    kind: KernelKind
    operator: int | None = None
    """Index of the event that launched it."""
    size_bytes: float | None = None

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Steps of the profiler's window."""

    events: tuple[Event, ...]
    kernels: tuple[Kernel, ...] = ()
    collectives: tuple[Event, ...] = ()
    """Of a backend that works on the host (gloo), from their start to their end."""
    steps: int | None = None
    """How many; None: they were not labelled."""
    left_out: int = 0
    """Steps that took much longer than the others: what disturbed them belongs to none."""


class _RawEvent(Protocol):
    def linked_correlation_id(self) -> int: ...

    def device_type(self) -> object: ...

    def correlation_id(self) -> int: ...

    def name(self) -> str: ...


def links_of(raw_events: Iterable[_RawEvent]) -> Links:
    """From the profiler's own events (`kineto_results.events()`), for a torch whose FunctionEvents lack it (2.11)."""
    found: Links = {}
    for one in raw_events:
        linked = one.linked_correlation_id()
        if linked:
            found[str(one.device_type()).rpartition(".")[2], one.correlation_id(), one.name()] = linked
    return found


def recorded(
    function_events: Iterable[FunctionEvent], *, steps: int | None = None, links: Links | None = None
) -> Recording:
    """The events that `torch.profiler.profile(...).events()` returns: ordered by their start.

    steps: how many labelled steps were whole; what lies outside of them is left out. links: for events
    that do not say themselves which operator they belong to.
    """
    given = list(function_events)

    def _linked(one: FunctionEvent) -> int:
        """The number of the operator that a kernel, or a call of the driver, belongs to; 0 for an operator."""
        if links is not None:
            return links.get((_kind_of_device(one), one.id, one.name), 0)
        return int(getattr(one, "linked_correlation_id", 0) or 0)

    host = [one for one in given if _kind_of_device(one) == "CPU" and not one.is_async]
    exchanged = [one for one in given if one.is_async and one.name.startswith(_HOST_BACKENDS)]
    whole = _steps(host)[:steps] if steps is not None else []
    kept = typical(whole)
    if kept:
        starts = [begin for begin, _ in kept]
        host = [one for one in host if _is_within(one.time_range.start, starts, kept)]
        exchanged = [one for one in exchanged if _is_within(one.time_range.start, starts, kept)]
    index = {id(one): number for number, one in enumerate(host)}
    by_correlation = {one.id: number for number, one in enumerate(host) if not _linked(one)}
    kernels = [one for one in given if _kind_of_device(one) == "CUDA" and not one.is_user_annotation]
    if kept:  # they may run later than the step that queued them
        kernels = [one for one in kernels if _linked(one) in by_correlation]
    return Recording(
        events=tuple(_event(one, index) for one in host),
        kernels=tuple(_kernel(one, by_correlation.get(_linked(one))) for one in kernels),
        collectives=tuple(_event(one, {}) for one in exchanged),
        steps=len(kept) if kept else None,
        left_out=len(whole) - len(kept),
    )


def typical(steps: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those (begin, end) that take no more than twice the median.

    >>> typical([(0, 1), (1, 2.1), (2.1, 9)])
    [(0, 1), (1, 2.1)]
    """
    if not steps:
        return []
    longest = DISTURBED * statistics.median(end - begin for begin, end in steps)
    return [(begin, end) for begin, end in steps if end - begin <= longest]


def _steps(host: Sequence[FunctionEvent]) -> list[tuple[float, float]]:
    """Where none has our label, as in recordings of others, by torch's."""
    labelled = [one for one in host if one.name == STEP] or [one for one in host if one.name.startswith("ProfilerStep")]
    return sorted((one.time_range.start, one.time_range.end) for one in labelled)


def _is_within(time: float, starts: Sequence[float], steps: Sequence[tuple[float, float]]) -> bool:
    number = bisect_right(starts, time) - 1
    return number >= 0 and time < steps[number][1]


def _event(one: FunctionEvent, index: dict[int, int]) -> Event:
    parent = one.cpu_parent
    shapes: Iterable[object] = one.input_shapes or ()
    return Event(
        name=one.name,
        begin=one.time_range.start / 1e6,
        end=one.time_range.end / 1e6,
        parent=index.get(id(parent)) if parent is not None else None,
        shapes=tuple(shape for given in shapes if (shape := _shape(given))),
        backward=one.scope == _BACKWARD_SCOPE or one.name.startswith(_EVALUATES),
        annotation=bool(one.is_user_annotation),
        device_seconds=sum(kernel.duration for kernel in one.kernels) / 1e6,
    )


def _shape(given: object) -> tuple[int, ...]:
    """() for a scalar, and for what is no tensor."""
    sizes = given if isinstance(given, (list, tuple)) else ()
    return tuple(sizes) if all(isinstance(size, int) for size in sizes) else ()


def _kind_of_device(one: FunctionEvent) -> str:
    """'CPU', 'CUDA': its enumeration has no public name."""
    return str(one.device_type).rpartition(".")[2]


def _kernel(one: FunctionEvent, operator: int | None) -> Kernel:
    kind: KernelKind = next((kind for kind, starts in _KINDS if one.name.startswith(starts)), "kernel")
    return Kernel(
        name=one.name,
        begin=one.time_range.start / 1e6,
        end=one.time_range.end / 1e6,
        kind=kind,
        operator=operator,
        size_bytes=_copied(one) if kind == "copy" else None,
    )


def _copied(one: FunctionEvent) -> float | None:
    """The size of a copy, which only newer versions of torch pass on."""
    size = getattr(getattr(one, "event_metadata", None), "bytes", None)
    return float(size) if isinstance(size, (int, float)) else None
