"""Which tensors leak: what is held when a step ends, line by line, and whether that grows steadily.

    marks = [event at which step 1 ended, step 2, ...]
    growths(timeline, marks)             # one entry for each line and operation whose tensors grow

Only the ends of steps count: what is allocated and freed within a step is no leak, and what a loop's variables still
hold when it ends is the same each time. A warm-up that fills a cache, a bounded queue or the momentum of the first
step stop growing, which distinguishes them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from flatout.memory.timeline import Allocation, Timeline

LEAST_STEPS = 5
"""With fewer steps, a cache that fills cannot be told from one that grows without limit."""
LEAST_INCREASES = 3

Kind = Literal["more", "larger"]


@dataclass(frozen=True, kw_only=True)
class Growth:
    """Tensors allocated at one line: how many of them, and how many bytes, are held at each mark."""

    line: str
    kind: Kind
    """`more` tensors from step to step, or as many that are `larger`."""
    counts: tuple[int, ...]
    sizes_bytes: tuple[int, ...]
    alive: tuple[Allocation, ...]
    """Those held at the last mark, in order of allocation."""

    @property
    def bytes_per_step(self) -> float:
        return (self.sizes_bytes[-1] - self.sizes_bytes[0]) / (len(self.sizes_bytes) - 1)

    @property
    def samples(self) -> tuple[Allocation, ...]:
        """A few to find a common holder of: of different steps, and none that a loop's variable may hold."""
        if self.kind == "larger":
            return self.alive[-1:]
        last = self.alive[-1].step
        first_of_step = {one.step: one for one in reversed(self.alive) if one.step < last}
        steps = sorted(first_of_step)[-3:]
        return tuple(first_of_step[step] for step in steps)


@dataclass(frozen=True, kw_only=True)
class Leak:
    """What grows from step to step, and what holds it."""

    holder: str
    """By the name it has in the script: 'history', 'Recorder.cache'; '' where no name was found."""
    kind: str
    """global, local, attribute, closure or cached function."""
    type_name: str
    entries: int | None
    entries_per_step: float | None
    line: str
    """Where the script makes the holder grow: 'train.py:31'; '' if it was not found."""
    source: str
    bytes_per_step: float
    tensors_per_step: float
    graph_nodes_per_step: float
    """Nodes of autograd's graph: they take memory of the process, and no tensor's."""
    births: tuple[str, ...]
    """Lines that made the tensors."""
    bounded: str = ""
    """Why it will stop growing; then it is not a leak."""


def grows_steadily(values: Sequence[int]) -> bool:
    """Never smaller, several times larger, both in the first half and in the last third."""
    changes = [after - before for before, after in itertools.pairwise(values)]
    increases = [at for at, change in enumerate(changes, 1) if change > 0]
    if len(changes) < LEAST_STEPS or len(increases) < LEAST_INCREASES or min(changes) < 0:
        return False
    return increases[0] <= len(changes) / 2 and increases[-1] > len(changes) * 2 / 3


def growths(timeline: Timeline, marks: Sequence[int]) -> list[Growth]:
    """What grows from mark to mark, by line and operation, what grows fastest first.

    A mark is the number of events so far. With too few marks the list is empty.
    """
    by_origin: dict[tuple[str, str, str], list[Allocation]] = {}
    for one in timeline.allocations:
        if one.size_bytes and any(_is_held_at(one, mark) for mark in marks):
            by_origin.setdefault((one.line or one.module, one.phase, one.operation), []).append(one)
    found = [growth for (line, *_), ones in by_origin.items() if (growth := _growth(line, ones, marks)) is not None]
    return sorted(found, key=lambda growth: -growth.bytes_per_step)


def _is_held_at(one: Allocation, mark: int) -> bool:
    return one.born < mark and (one.died is None or one.died >= mark)


def _growth(line: str, ones: list[Allocation], marks: Sequence[int]) -> Growth | None:
    held = [[one for one in ones if _is_held_at(one, mark)] for mark in marks]
    counts = tuple(len(some) for some in held)
    sizes = tuple(sum(one.size_bytes for one in some) for some in held)
    kind: Kind
    if grows_steadily(counts):
        kind = "more"
    elif grows_steadily(sizes) and counts[-1] == counts[len(counts) // 2]:
        kind = "larger"
    else:
        return None
    return Growth(line=line, kind=kind, counts=counts, sizes_bytes=sizes, alive=tuple(held[-1]))
