"""When memory of tensors was allocated and freed: plain values, evaluated after the run.

An `Allocation` is one storage, however many views it has. A `Timeline` holds all of them with the order of events, so
peak, categories and holders are computed afterwards, for any part of the run.

    weights      parameters and buffers of the model
    gradients    what the parameters' .grad held when a backward pass ended
    optimizer    what the optimizer's state held
    inputs       the batch
    activations  allocated in a forward and alive when it ended: kept for the backward pass
    temporaries  everything else: allocated and freed within a forward, a backward or an optimizer's step
    workspaces   what kernel libraries allocate and keep (cuBLAS)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Category = Literal["weights", "gradients", "optimizer", "inputs", "activations", "temporaries", "workspaces"]
CATEGORIES: tuple[Category, ...] = get_args(Category)
Phase = Literal["before", "forward", "backward", "optimizer"]


@dataclass(slots=True)
class Allocation:
    """One storage. `born` and `died` are numbers of events; `died` is None for what outlived the run."""

    size_bytes: int
    born: int
    phase: Phase
    step: int
    operation: str = ""
    module: str = ""
    """Where in the model: 'layers.3.attention', or '' outside of it."""
    line: str = ""
    """The user's line that allocated it: 'train.py:31'."""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    device: str = "cpu"
    stream: int = 0
    """In which it was allocated; 0: the default one. Blocks of one stream do not serve another."""
    category: Category = "temporaries"
    died: int | None = None


@dataclass(frozen=True, kw_only=True)
class TensorUse:
    """One of the largest tensors that were held at a peak."""

    size_bytes: int
    category: str
    shape: tuple[int, ...]
    dtype: str
    module: str
    line: str
    operation: str

    @classmethod
    def of(cls, one: Allocation, category: str, operation: str) -> TensorUse:
        same = {name: getattr(one, name) for name in ("size_bytes", "shape", "dtype", "module", "line")}
        return cls(category=category, operation=operation, **same)


@dataclass(frozen=True)
class Peak:
    """The first moment at which the most was held."""

    size_bytes: int
    event: int
    allocation: Allocation | None
    """The one that reached it."""


class Timeline:
    """Allocations in their order, and every event in order: (allocation's index, True) born, (index, False) died."""

    def __init__(self, allocations: Sequence[Allocation], events: Sequence[tuple[int, bool]]) -> None:
        self.allocations, self.events = allocations, events

    def totals(self, device: str | None = None) -> Iterator[int]:
        """Bytes held after each event; with `device`, of that device alone ('cpu', 'cuda')."""
        held = 0
        for index, born in self.events:
            one = self.allocations[index]
            if device is None or one.device == device:
                held += one.size_bytes if born else -one.size_bytes
            yield held

    def peak(self, device: str | None = None) -> Peak:
        best, at = 0, -1
        for event, held in enumerate(self.totals(device)):
            if held > best:
                best, at = held, event
        return Peak(best, at, self.allocations[self.events[at][0]] if at >= 0 else None)

    def alive_at(self, event: int, device: str | None = None) -> list[Allocation]:
        """What was held right after an event, largest first."""
        alive = [
            one
            for one in self.allocations
            if one.born <= event and (one.died is None or one.died > event) and device in (None, one.device)
        ]
        return sorted(alive, key=lambda one: -one.size_bytes)


def by_category(allocations: Sequence[Allocation]) -> dict[Category, int]:
    """Bytes of each category; every category is there."""
    sums: dict[Category, int] = dict.fromkeys(CATEGORIES, 0)
    for one in allocations:
        sums[one.category] += one.size_bytes
    return sums
