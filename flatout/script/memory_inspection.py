"""Inspects a script that is paused between two steps: its memory timeline, what leaks, and what holds it."""

from __future__ import annotations

import gc
import linecache
import os
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import FrameType

from torch import Tensor

from flatout.memory.graphs import Graph, graphs_of, live_tensors
from flatout.memory.holders import Found, HolderSearch
from flatout.memory.holding_lines import HoldingLines, Scope, hook_lines, lines_of, refers_to_itself
from flatout.memory.leaks import Growth, Leak, grows_steadily, growths
from flatout.memory.timeline import Timeline
from flatout.memory.tracking import Tracker, identity
from flatout.memory.use import use_of
from flatout.script.trial.messages import MemoryAnswer
from flatout.tracebacks import is_users_file, within

_JOINS = ("cat", "stack", "pad", "resize")


@dataclass
class Suspect:
    """Something that grows, and what holds it; several lines may add to one holder."""

    found: Found | None
    growths: list[Growth] = field(default_factory=list)
    nodes_per_step: float = 0.0
    entries_before: int | None = None
    lines: HoldingLines = field(default_factory=lambda: HoldingLines((), ()))
    file: str = ""


class Inspection:
    """Made at the end of a step; `suspects` are what grows, `result` is the complete finding."""

    def __init__(
        self,
        *,
        tracker: Tracker,
        marks: Sequence[int],
        numbers: Sequence[int],
        first_event: int,
        warm_up: int,
        one_backward_a_step: bool,
        frame: FrameType | None,
        folder: str,
    ) -> None:
        """folder: what lines are named relative to: the script's, as in a profile."""
        self._folder = folder
        self.timeline = _shortened(tracker.timeline(), folder)
        self.use = use_of(
            self.timeline, marks, first_event=first_event, warm_up=warm_up, one_backward_a_step=one_backward_a_step
        )
        self.judged_steps = max(0, len(marks) - warm_up)
        self._marks, self._numbers = marks[warm_up - 1 :], numbers[warm_up - 1 :]
        self.collected: list[str] = []
        self.suspects: list[Suspect] = []
        found = growths(self.timeline, self._marks)
        gc.collect()  # what only a reference cycle holds is no leak
        self._frames = list(_frames(frame))
        self._alive = {id(one): key for key, one in tracker.alive_by_storage().items()}
        self._tensors = live_tensors()
        self._graphs = graphs_of(self._tensors, numbers[0]) if numbers else []
        ours = [self._tensors, self._graphs, *self._graphs, *(vars(graph) for graph in self._graphs), vars(self)]
        self._search = HolderSearch(is_users_file, self._frames, ours)
        self._by_storage: dict[int, list[Tensor]] = {}
        self._by_gradient: dict[int, list[Tensor]] = {}
        self._sort_tensors()
        for growth in found:
            self._suspect_growth(growth, running=frame is not None)
        self._suspect_graphs()
        self._find_lines()
        self._release()

    def sizes(self) -> list[Callable[[], int]]:
        """Functions that return the current size of each suspect's holder."""
        return [_size_of(suspect.found) for suspect in self.suspects]

    def result(self, traced: Callable[[int], tuple[str, int] | None], steps_traced: int) -> MemoryAnswer:
        leaks = [
            leak
            for number, suspect in enumerate(self.suspects)
            if (leak := self._leak(suspect, traced(number), steps_traced)) is not None
        ]
        return {
            "use": self.use.to_json(),
            "judged_steps": self.judged_steps,
            "leaks": [asdict(leak) for leak in sorted(leaks, key=lambda leak: -leak.bytes_per_step)],
            "collected": self.collected,
        }

    def _sort_tensors(self) -> None:
        for tensor in self._tensors:
            self._by_storage.setdefault(identity(tensor), []).append(tensor)
            if tensor.is_leaf and tensor.grad is not None:
                self._by_gradient.setdefault(identity(tensor.grad), []).append(tensor)
        for container in (self._by_storage, self._by_gradient):
            for tensors in (container, *container.values()):
                self._search.ignore(tensors)

    # suspects

    def _suspect_growth(self, growth: Growth, *, running: bool) -> None:
        alive = [one for one in growth.alive if id(one) in self._alive]
        if running and len(alive) < max(1, len(growth.alive) // 2):
            self.collected.append(growth.line)
            return
        found = self._holder_of(growth)
        self._suspect(found).growths.append(growth)

    def _suspect(self, found: Found | None) -> Suspect:
        """The one with this holder."""
        known = next((one for one in self.suspects if _same(one.found, found)), None)
        if known is None:
            self.suspects.append(known := Suspect(found))
        return known

    def _holder_of(self, growth: Growth) -> Found | None:
        keys = [self._alive[id(one)] for one in growth.samples if id(one) in self._alive]
        if not keys:
            return None
        owned = [owner for key in keys if (owner := self._owner(key)) is not None]
        found = self._common(owned) if len(owned) == len(keys) else None
        if found is None:  # no variable: a graph holds them
            found = self._common([root for key in keys if (root := self._root_that_saved(key)) is not None])
        return found

    def _owner(self, key: int) -> Tensor | None:
        """A tensor with that storage that something in Python holds, or whose gradient it is."""
        owners = [*self._by_storage.get(key, ()), *self._by_gradient.get(key, ())]
        self._search.ignore(owners)
        return next((one for one in owners if self._common([one]) is not None), None)

    def _root(self, holds: Callable[[Graph], bool]) -> Tensor | None:
        """Root of the smallest such graph; a tensor that only another graph holds is no root."""
        graphs = sorted((graph for graph in self._graphs if holds(graph)), key=lambda graph: len(graph.numbers))
        return next((graph.root for graph in graphs if self._common([graph.root]) is not None), None)

    def _root_that_saved(self, key: int) -> Tensor | None:
        return self._root(lambda graph: key in graph.saved)

    def _root_of_step(self, step: int) -> Tensor | None:
        return self._root(lambda graph: any(bisect_right(self._numbers, number) == step for number in graph.numbers))

    def _common(self, tensors: list[Tensor]) -> Found | None:
        self._search.ignore(tensors)
        return self._search.common(tuple(tensors)) if tensors else None

    def _suspect_graphs(self) -> None:
        """Graph nodes of old steps that stay alive although their saved tensors are gone: `total += loss`."""
        ends = self._numbers
        if len(ends) < 2:
            return
        steps = Counter(
            bisect_right(ends, number) for number in {number for graph in self._graphs for number in graph.numbers}
        )
        judged = range(1, len(ends) - 1)  # of the last step the loop's variables hold all
        cumulated = [sum(steps[one] for one in judged if one <= upto) for upto in (0, *judged)]
        if not grows_steadily(cumulated):
            return
        samples = [step for step in judged if steps[step]][-3:]
        found = self._common([root for step in samples if (root := self._root_of_step(step)) is not None])
        if found is None:
            return
        nodes = sum(steps[step] for step in judged) / len(judged)
        self._suspect(found).nodes_per_step = nodes

    # lines

    def _find_lines(self) -> None:
        files = [file for one in list(sys.modules.values()) if is_users_file(file := _file(one))]
        for suspect in self.suspects:
            found = suspect.found
            if found is None:
                continue
            suspect.entries_before = found.entries
            suspect.file = found.file
            if found.kind == "cached function":
                suspect.lines = HoldingLines((found.first_line,), ())
                continue
            for link in found.links:
                for file in dict.fromkeys([found.file, *files]):
                    of_function = found.kind == "local" and link == found.links[-1] and file == found.file
                    scope = Scope(first_line=found.first_line if of_function else 0)
                    lines = _read_lines(file, link, scope)
                    if lines.grows and not suspect.lines.grows:
                        suspect.file, suspect.lines = file, lines

    def _leak(self, suspect: Suspect, traced: tuple[str, int] | None, steps_traced: int) -> Leak | None:
        found = suspect.found
        file, line = suspect.file, (suspect.lines.grows or (0,))[0]
        if traced is not None and found is not None and found.kind != "cached function":
            file, line = traced
        if all(growth.kind == "larger" for growth in suspect.growths) and not suspect.nodes_per_step:
            joined = any(word in one.operation for growth in suspect.growths for one in growth.alive for word in _JOINS)
            source = _source(file)
            itself = found is not None and any(refers_to_itself(source, line, link) for link in found.links)
            if not joined and not itself:
                return None  # batches of another length, in the same variable
        births = tuple(dict.fromkeys(growth.line for growth in suspect.growths))
        entries = found.entries if found is not None else None
        grown = None
        if entries is not None and suspect.entries_before is not None and steps_traced:
            grown = (entries - suspect.entries_before) / steps_traced
        tensors = sum((growth.counts[-1] - growth.counts[0]) / (len(growth.counts) - 1) for growth in suspect.growths)
        return Leak(
            holder=found.name if found is not None else "",
            kind=found.kind if found is not None else "",
            type_name=found.type_name if found is not None else "",
            entries=entries,
            entries_per_step=grown,
            line=_place(f"{file}:{line}", self._folder) if line else "",
            source=linecache.getline(file, line).strip() if line else "",
            bytes_per_step=sum(growth.bytes_per_step for growth in suspect.growths),
            tensors_per_step=tensors,
            graph_nodes_per_step=suspect.nodes_per_step,
            births=births,
            bounded=self._bound(suspect),
        )

    def _bound(self, suspect: Suspect) -> str:
        found = suspect.found
        if found is None or isinstance(found.container, Tensor):
            return ""
        lines = suspect.lines
        if not found.bound and lines.shrinks:
            return f"the script also removes from it: {self._line_text(suspect.file, lines.shrinks[0])}"
        if not found.bound and lines.renews and not suspect.nodes_per_step:  # graphs fill the memory within an epoch
            return f"the script makes it anew or empties it: {self._line_text(suspect.file, lines.renews[0])}"
        return found.bound

    def _line_text(self, file: str, line: int) -> str:
        return f"{_place(f'{file}:{line}', self._folder)}  {linecache.getline(file, line).strip()}"

    def _release(self) -> None:
        """Drop all references to the script's objects before its next steps, except to the suspected containers."""
        self._tensors, self._graphs, self._frames = [], [], []
        self._by_storage.clear()
        self._by_gradient.clear()
        del self._search
        for suspect in self.suspects:
            if suspect.found is not None and isinstance(suspect.found.container, Tensor):
                suspect.found = replace(suspect.found, owner=None)


def _shortened(timeline: Timeline, folder: str) -> Timeline:
    places: dict[str, str] = {"": ""}
    for one in timeline.allocations:
        if one.line not in places:
            places[one.line] = _place(one.line, folder)
        one.line = places[one.line]
    return timeline


def _place(line: str, folder: str) -> str:
    """Of '/home/me/train.py:12': 'train.py:12' where that is in the folder, also by another path."""
    file, _, number = line.rpartition(":")
    return f"{within(os.path.realpath(file), folder)}:{number}"


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _same(one: Found | None, other: Found | None) -> bool:
    """Is it one holder? An optimizer's state and its parameters count as one, as does everything without a name."""
    if one is None or other is None:
        return one is other
    return one.container is other.container or (one.owner is not None and one.owner is other.owner)


def _size_of(found: Found | None) -> Callable[[], int]:
    return lambda: (found.entries or 0) if found is not None else 0


def _file(module: object) -> str:
    file: str | None = getattr(module, "__file__", None)
    return file or ""


def _source(file: str) -> str:
    return "".join(linecache.getlines(file))


def _read_lines(file: str, link: str, scope: Scope) -> HoldingLines:
    source = _source(file)
    try:
        return hook_lines(source) if link.endswith("_hooks") else lines_of(source, link, scope)
    except SyntaxError:  # it was changed since it was imported
        return HoldingLines((), ())
