"""Tensors that live from step to step: how many bytes, and whether they hold graphs of earlier steps.

Nodes of autograd are numbered in the order in which they are made. A graph that is alive at the end of a step and has
nodes of many earlier steps is kept by something that only needed a number: `losses.append(loss)`, `total += loss`.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Sequence

from torch import Tensor

from flatout.memory.graphs import graphs_of, live_tensors, newest_number
from flatout.memory.tracking import identity

EXAMINED_STEPS = 10
"""Each takes some 20 ms or more, as it looks at all objects."""
FIRST_LOOK, SECOND_LOOK = 5, 9
GRAPHS_IN_USE = 2
"""The last step's variables are still there, and perhaps those of a step before."""


class KeptGraphs:
    """`step_ended` after each step, from the first one of the window on."""

    def __init__(self) -> None:
        self._marks: list[int] = []
        self._kept: dict[int, int] = {}
        self._older: list[weakref.ref[Tensor]] = []
        self.live_bytes: list[int] = []

    def begin(self) -> None:
        """Before what is there already is frozen, which takes it out of the collector's lists: a sum that goes on is
        such a tensor."""
        self._older = [weakref.ref(one) for one in live_tensors() if one.grad_fn is not None]

    @property
    def done(self) -> bool:
        return len(self._marks) >= EXAMINED_STEPS

    def step_ended(self) -> None:
        self._marks.append(newest_number())
        tensors = live_tensors()
        sizes: dict[int, int] = {}
        for one in tensors:
            try:
                sizes[identity(one)] = one.untyped_storage().nbytes()
            except (RuntimeError, NotImplementedError):  # it has no storage, as a sparse one
                continue
        self.live_bytes.append(sum(sizes.values()))
        if len(self._marks) in (FIRST_LOOK, SECOND_LOOK):
            older = [root for reference in self._older if (root := reference()) is not None]
            graphs = graphs_of([*older, *(one for one in tensors if one.grad_fn is not None)], since=self._marks[0])
            self._kept[len(self._marks)] = self.steps_of([number for graph in graphs for number in graph.numbers])

    def steps_of(self, numbers: Sequence[int]) -> int:
        """How many earlier steps have a node among these, without those that may still be in use."""
        steps = {bisect.bisect_right(self._marks, number) for number in numbers}
        return sum(1 for step in steps if 0 < step <= len(self._marks) - 1 - GRAPHS_IN_USE)

    @property
    def kept_steps(self) -> int:
        """At the second look, where there were more than at the first; else 0."""
        first, second = self._kept.get(FIRST_LOOK, 0), self._kept.get(SECOND_LOOK)
        return second if second is not None and second - first >= SECOND_LOOK - FIRST_LOOK - 1 else 0

    @property
    def bytes_per_step(self) -> float | None:
        """Median growth; None where there is none, or too few steps were seen."""
        rises = sorted(after - before for before, after in zip(self.live_bytes, self.live_bytes[1:], strict=False))
        middle = rises[len(rises) // 2] if len(rises) >= 4 else 0
        return float(middle) if middle > 0 else None
