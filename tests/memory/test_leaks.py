"""What grows from step to step, told from what fills up, stays or varies."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from flatout.memory.leaks import grows_steadily, growths
from flatout.memory.timeline import Allocation, Timeline


class Recording:
    """A timeline made by hand: `born` and `died` in the order of the calls, `mark` where a step ends."""

    def __init__(self) -> None:
        self.allocations: list[Allocation] = []
        self.events: list[tuple[int, bool]] = []
        self.marks: list[int] = []

    def born(self, size_bytes: int, line: str = "train.py:1", operation: str = "add") -> int:
        index = len(self.allocations)
        self.allocations.append(
            Allocation(
                size_bytes=size_bytes,
                born=len(self.events),
                phase="forward",
                step=len(self.marks),
                line=line,
                operation=operation,
            )
        )
        self.events.append((index, True))
        return index

    def died(self, index: int) -> None:
        self.allocations[index].died = len(self.events)
        self.events.append((index, False))

    def mark(self) -> None:
        self.marks.append(len(self.events))

    @property
    def timeline(self) -> Timeline:
        return Timeline(self.allocations, self.events)


@pytest.mark.parametrize(
    ("values", "grows"),
    [
        ([1, 2, 3, 4, 5, 6], True),
        ([1, 1, 2, 2, 3, 3, 4, 4, 5], True),
        ([3, 3, 3, 3, 3, 3], False),
        ([1, 2, 3, 4, 4, 4, 4, 4, 4], False),  # a cache that is full
        ([1, 2, 3, 1, 2, 3, 1, 2], False),  # emptied from time to time
        ([1, 1, 1, 1, 1, 1, 2, 3, 4], False),  # began too late to tell
        ([1, 2, 3, 4], False),  # too short to tell
    ],
)
def test_steady_growth_is_told_from_what_ends(values: Sequence[int], grows: bool) -> None:
    assert grows_steadily(values) is grows


def test_what_is_kept_of_each_step_grows_by_number() -> None:
    run = Recording()
    for _ in range(7):
        run.died(run.born(4096, "train.py:9"))  # within the step
        run.born(100, "train.py:5")
        run.mark()
    (growth,) = growths(run.timeline, run.marks)
    assert (growth.line, growth.kind, growth.bytes_per_step) == ("train.py:5", "more", 100)
    assert growth.counts == (1, 2, 3, 4, 5, 6, 7)
    assert [one.step for one in growth.samples] == [3, 4, 5]  # the last step's may be a loop's variable


def test_what_is_replaced_by_a_larger_one_grows_by_size() -> None:
    run = Recording()
    before = None
    for step in range(7):
        now = run.born(100 * (step + 1), operation="cat.default")
        if before is not None:
            run.died(before)
        before = now
        run.mark()
    (growth,) = growths(run.timeline, run.marks)
    assert (growth.kind, growth.bytes_per_step, len(growth.samples)) == ("larger", 100, 1)


def test_a_bounded_queue_and_a_loops_variables_do_not_grow() -> None:
    run = Recording()
    queue: list[int] = []
    last = None
    for _ in range(9):
        output = run.born(64, "train.py:3")
        if last is not None:
            run.died(last)
        last = output
        queue.append(run.born(10, "train.py:7"))
        if len(queue) > 3:
            run.died(queue.pop(0))
        run.mark()
    assert growths(run.timeline, run.marks) == []


def test_a_line_that_does_two_things_is_judged_by_each() -> None:
    run = Recording()
    for step in range(7):
        run.died(run.born(1000 * (step % 2 + 1), operation="mm"))
        run.born(10, operation="clone")
        run.mark()
    assert [growth.bytes_per_step for growth in growths(run.timeline, run.marks)] == [10]
