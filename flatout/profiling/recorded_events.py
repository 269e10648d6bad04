"""What torch's profiler recorded, as plain values: events in a forest by thread, kernels, copies.

events = recorded(profiler.events())
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch.autograd.profiler_util import FunctionEvent

_BACKWARD_SCOPE = 1
"""torch's RecordScope::BACKWARD_FUNCTION."""
_EVALUATES = "autograd::engine::evaluate_function"
_COMMUNICATION = ("nccl", "ncclKernel", "ncclDevKernel")


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
    kind: Literal["kernel", "copy", "set", "communication"]
    operator: int | None = None
    """Index of the event that launched it."""
    size_bytes: float | None = None

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A window of the profiler."""

    events: tuple[Event, ...]
    kernels: tuple[Kernel, ...] = ()


def recorded(function_events: Iterable[FunctionEvent], *, steps: int | None = None) -> Recording:
    """The events that `torch.profiler.profile(...).events()` returns: ordered by their start.

    steps: how many steps labelled 'ProfilerStep' were whole; what began after the last of them is left out.
    """
    from torch.autograd import DeviceType

    given = list(function_events)
    host = [one for one in given if one.device_type == DeviceType.CPU and not one.is_async]
    until = _end_of_step(host, steps) if steps is not None else math.inf
    host = [one for one in host if one.time_range.start < until]
    index = {id(one): number for number, one in enumerate(host)}
    by_correlation = {one.id: number for number, one in enumerate(host) if not _linked(one)}
    kernels = [one for one in given if one.device_type == DeviceType.CUDA and not one.is_user_annotation]
    kept = [one for one in kernels if _linked(one) in by_correlation or one.time_range.start < until]
    return Recording(
        events=tuple(_event(one, index) for one in host), kernels=tuple(_kernel(one, by_correlation) for one in kept)
    )


def _end_of_step(host: Sequence[FunctionEvent], steps: int) -> float:
    ends = sorted(one.time_range.end for one in host if one.name.startswith("ProfilerStep"))
    return ends[steps - 1] if 0 < steps <= len(ends) else math.inf


def _event(one: FunctionEvent, index: dict[int, int]) -> Event:
    parent = one.cpu_parent
    shapes = one.input_shapes or ()
    return Event(
        name=one.name,
        begin=one.time_range.start / 1e6,
        end=one.time_range.end / 1e6,
        parent=index.get(id(parent)) if parent is not None else None,
        shapes=tuple(tuple(shape) for shape in shapes if _is_shape(shape)),
        backward=one.scope == _BACKWARD_SCOPE or one.name.startswith(_EVALUATES),
        annotation=bool(one.is_user_annotation),
        device_seconds=sum(kernel.duration for kernel in one.kernels) / 1e6,
    )


def _is_shape(shape: object) -> bool:
    return isinstance(shape, (list, tuple)) and bool(shape) and all(isinstance(size, int) for size in shape)


def _kernel(one: FunctionEvent, by_correlation: dict[int, int]) -> Kernel:
    name = one.name
    kind: Literal["kernel", "copy", "set", "communication"] = "kernel"
    if name.startswith(("Memcpy", "memcpy")):
        kind = "copy"
    elif name.startswith(("Memset", "memset")):
        kind = "set"
    elif name.startswith(_COMMUNICATION):
        kind = "communication"
    return Kernel(
        name=name,
        begin=one.time_range.start / 1e6,
        end=one.time_range.end / 1e6,
        kind=kind,
        operator=by_correlation.get(_linked(one)),
        size_bytes=_copied(one) if kind == "copy" else None,
    )


def _linked(one: FunctionEvent) -> int:
    """The number of the operator that a kernel, or a call of the driver, belongs to; 0 for an operator."""
    return int(getattr(one, "linked_correlation_id", 0) or 0)


def _copied(one: FunctionEvent) -> float | None:
    """The size of a copy, which only newer versions of torch pass on."""
    size = getattr(getattr(one, "event_metadata", None), "bytes", None)
    return float(size) if isinstance(size, (int, float)) else None
