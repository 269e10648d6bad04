"""What the tensors of a run held: a value, computed from its timeline when the run has ended.

use = use_of(timeline, marks, first_event=..., warm_up=2)
use.peak.size_bytes, use.peak.line, use.peak.categories
use.steps[3].held_bytes
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from flatout.decoding import decode
from flatout.memory.savings import Saving, savings_of
from flatout.memory.timeline import CATEGORIES, Allocation, TensorUse, Timeline

MOST_LINES = 8
MOST_TENSORS = 8
CATEGORIES_AND_OTHER = (*CATEGORIES, "other")
_LASTING = ("weights", "gradients", "optimizer")


@dataclass(frozen=True, kw_only=True)
class Moment:
    """When the most was held, and what led to it."""

    size_bytes: int
    step: int | None
    """Counted from 1; None: before the first step, or where no steps were found."""
    phase: str
    module: str
    line: str
    operation: str
    categories: Mapping[str, int]
    """They add up to `size_bytes`. `other`: what was made in earlier steps or before the first and is none of these."""


@dataclass(frozen=True, kw_only=True)
class StepUse:
    """One step: the most that was held in it, and what was held when it ended."""

    step: int
    peak_bytes: int
    held_bytes: int


@dataclass(frozen=True, kw_only=True)
class LineUse:
    """What one line of the script allocated and was held at the peak."""

    line: str
    size_bytes: int
    tensors: int
    categories: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Tensors of one kind of device ('cpu', 'cuda') over a run."""

    device: str
    peak: Moment
    steps: tuple[StepUse, ...]
    warm_up: int
    """So many steps at the start are not judged."""
    between_steps_bytes: int | None
    """Held when the last step had ended."""
    lines: tuple[LineUse, ...]
    tensors: tuple[TensorUse, ...]
    savings: tuple[Saving, ...]

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: object) -> MemoryUse:
        return decode(cls, data)


def device_of(timeline: Timeline) -> str:
    """Where memory is scarce: the accelerator, if any tensor was ever on it."""
    kinds = {one.device for one in timeline.allocations if one.size_bytes}
    return next((kind for kind in ("cuda", "xpu", "mps") if kind in kinds), "cpu")


def use_of(
    timeline: Timeline, marks: Sequence[int], *, first_event: int, warm_up: int, one_backward_a_step: bool
) -> MemoryUse:
    """`marks`: number of events at the end of each step; `first_event`: how many there were before the first step."""
    device = device_of(timeline)
    totals = list(timeline.totals(device))
    peak = timeline.peak(device)
    step = bisect_right(marks, peak.event) + 1
    trained = bool(marks) and first_event <= peak.event < marks[-1]
    alive = timeline.alive_at(peak.event, device)
    kinds = {id(one): _category(one, step - 1 if trained else None) for one in alive}
    categories = dict.fromkeys(CATEGORIES_AND_OTHER, 0)
    for one in alive:
        categories[kinds[id(one)]] += one.size_bytes
    cause = peak.allocation
    return MemoryUse(
        device=device,
        peak=Moment(
            size_bytes=peak.size_bytes,
            step=step if trained else None,
            phase=cause.phase if cause is not None else "",
            module=cause.module if cause is not None else "",
            line=cause.line if cause is not None else "",
            operation=_plain(cause.operation) if cause is not None else "",
            categories=categories,
        ),
        steps=_steps(totals, marks, first_event),
        warm_up=min(warm_up, len(marks)),
        between_steps_bytes=totals[marks[-1] - 1] if marks and marks[-1] else None,
        lines=_lines(alive, kinds),
        tensors=tuple(TensorUse.of(one, kinds[id(one)], _plain(one.operation)) for one in alive[:MOST_TENSORS]),
        savings=savings_of(timeline, marks, device, warm_up=warm_up, one_backward_a_step=one_backward_a_step),
    )


def _category(one: Allocation, step: int | None) -> str:
    """A batch or an activation of an earlier step is not counted as one: something else holds it."""
    of_setup = one.step < 0 and one.category == "inputs"  # the data set itself, where it is passed whole
    if one.category in _LASTING or of_setup or (step is not None and one.step == step):
        return one.category
    return "other" if step is not None or one.category == "temporaries" else one.category


def _steps(totals: Sequence[int], marks: Sequence[int], first_event: int) -> tuple[StepUse, ...]:
    starts = [first_event, *marks]
    uses = []
    for number, (start, end) in enumerate(zip(starts, marks, strict=False), 1):
        inside = totals[start:end] or totals[max(0, end - 1) : end] or [0]
        uses.append(StepUse(step=number, peak_bytes=max(inside), held_bytes=inside[-1]))
    return tuple(uses)


def _lines(alive: Sequence[Allocation], kinds: Mapping[int, str]) -> tuple[LineUse, ...]:
    by_line: dict[str, list[Allocation]] = {}
    for one in alive:
        by_line.setdefault(one.line, []).append(one)
    uses = [
        LineUse(
            line=line,
            size_bytes=sum(one.size_bytes for one in ones),
            tensors=len(ones),
            categories=tuple(sorted({kinds[id(one)] for one in ones})),
        )
        for line, ones in by_line.items()
    ]
    return tuple(sorted(uses, key=lambda use: -use.size_bytes)[:MOST_LINES])


def _plain(operation: str) -> str:
    """'mm.default' is shown as 'mm'."""
    return operation.removesuffix(".default")
