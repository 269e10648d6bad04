from __future__ import annotations

from flatout.memory.timeline import CATEGORIES, Allocation, Timeline, by_category


def timeline(*sizes: int) -> Timeline:
    """Two long-lived allocations and one that dies before the last is born."""
    first, second, third = (
        Allocation(size_bytes=size, born=i, phase="forward", step=0, operation=f"op{i}") for i, size in enumerate(sizes)
    )
    second.died, third.born = 2, 3
    return Timeline([first, second, third], [(0, True), (1, True), (1, False), (2, True)])


def test_the_peak_is_the_first_moment_of_most() -> None:
    one = timeline(10, 5, 5)
    assert list(one.totals()) == [10, 15, 10, 15]
    peak = one.peak()
    assert (peak.size_bytes, peak.event) == (15, 1)
    assert peak.allocation is one.allocations[1]
    assert [alive.size_bytes for alive in one.alive_at(1)] == [10, 5]
    assert [alive.operation for alive in one.alive_at(3)] == ["op0", "op2"]


def test_nothing_has_no_peak() -> None:
    assert Timeline([], []).peak().allocation is None


def test_devices_are_counted_apart() -> None:
    one = timeline(10, 5, 7)
    one.allocations[0].device = "cuda"
    assert one.peak("cuda").size_bytes == 10
    assert one.peak("cpu").size_bytes == 7


def test_categories_are_all_there() -> None:
    sums = by_category(timeline(1, 2, 3).allocations)
    assert tuple(sums) == CATEGORIES
    assert sums["temporaries"] == 6
