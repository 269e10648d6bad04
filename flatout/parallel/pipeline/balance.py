"""How many blocks each stage of a pipeline gets.

The slowest stage sets the pace. The first one also computes what comes before the blocks, the last one what comes after
them, so these often get fewer. Of splits that are about as fast, the one whose largest stage needs the least memory.

>>> split_evenly([1.0] * 6, [1] * 6, before=0.0, after=2.0, stages=2)
[0, 4, 6]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flatout.errors import UsageError

ABOUT_AS_FAST = 1.05


def split_evenly(
    seconds: Sequence[float],
    sizes: Sequence[int],
    *,
    before: float,
    after: float,
    stages: int,
) -> list[int]:
    """Where each stage begins, and the number of blocks: [0, ..., len(seconds)].

    seconds and sizes (bytes): of each block; before and after: seconds of what the first and the last stage compute
    besides.
    Raises UsageError for more stages than blocks.
    """
    blocks = len(seconds)
    if stages > blocks:
        raise UsageError(
            f"the model has {blocks} repeated block{'s' * (blocks != 1)}, and there are {stages} ranks",
            limit="parallel = 'pipeline' gives each rank at least one",
            remedy=f"use {blocks} ranks or fewer, or parallel = 'fsdp'" if blocks > 1 else "use parallel = 'fsdp'",
        )

    def time(first: int, last: int) -> float:
        return sum(seconds[first:last]) + before * (first == 0) + after * (last == blocks)

    def size(first: int, last: int) -> float:
        return sum(sizes[first:last])

    fastest, _ = _least_largest(time, blocks, stages, lambda first, last: True)
    limit = ABOUT_AS_FAST * fastest
    return _least_largest(size, blocks, stages, lambda first, last: time(first, last) <= limit)[1]


def _least_largest(
    cost: Callable[[int, int], float], blocks: int, stages: int, allowed: Callable[[int, int], bool]
) -> tuple[float, list[int]]:
    """(cost of the costliest stage, where stages begin) of the split whose costliest stage costs least."""
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [0])}
    for stage in range(1, stages + 1):
        reached: dict[int, tuple[float, list[int]]] = {}
        for last in range(stage, blocks - (stages - stage) + 1):
            for first, (most, begins) in best.items():
                if first < last and allowed(first, last):
                    found = max(most, cost(first, last))
                    if last not in reached or found < reached[last][0]:
                        reached[last] = found, [*begins, last]
        best = reached
    return best[blocks]
