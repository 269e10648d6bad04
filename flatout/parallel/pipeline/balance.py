"""How many blocks each stage of a pipeline gets.

The slowest stage sets the pace. The first one also computes what comes before the blocks, the last one what comes after
them, so these often get fewer. Of splits that are about as fast, the one whose largest stage needs the least memory:
the earlier a stage, the more parts of a batch are under way in it, whose activations it keeps.

>>> split_evenly([1.0] * 6, [1] * 6, before=0.0, after=2.0, stages=2)
[0, 4, 6]
>>> split_evenly([1.0] * 5, [1] * 5, kept=[3] * 5, before=0.0, after=0.0, stages=2)
[0, 2, 5]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flatout.errors import UsageError

ABOUT_AS_FAST = 1.05


def split_evenly(
    seconds: Sequence[float],
    sizes: Sequence[int],
    *,
    kept: Sequence[int] = (),
    before: float,
    after: float,
    stages: int,
) -> list[int]:
    """Where each stage begins, and the number of blocks: [0, ..., len(seconds)].

    seconds and sizes (bytes): of each block; kept: bytes of activations that it keeps for each part of a batch that is
    under way, nothing where there are none; before and after: seconds of what the first and the last stage compute
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

    def time(stage: int, first: int, last: int) -> float:
        return sum(seconds[first:last]) + before * (first == 0) + after * (last == blocks)

    def size(stage: int, first: int, last: int) -> float:
        return sum(sizes[first:last]) + (stages - stage) * sum(kept[first:last])

    fastest, _ = _least_largest(time, blocks, stages, lambda *_: True)
    limit = ABOUT_AS_FAST * fastest
    return _least_largest(size, blocks, stages, lambda *place: time(*place) <= limit)[1]


def _least_largest(
    cost: Callable[[int, int, int], float], blocks: int, stages: int, allowed: Callable[[int, int, int], bool]
) -> tuple[float, list[int]]:
    """(cost of the costliest stage, where stages begin) of the split whose costliest stage costs least. cost and
    allowed: of a stage, its first block and the one after its last."""
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [0])}
    for stage in range(stages):
        reached: dict[int, tuple[float, list[int]]] = {}
        for last in range(stage + 1, blocks - (stages - stage) + 2):
            for first, (most, begins) in best.items():
                if first < last and allowed(stage, first, last):
                    found = max(most, cost(stage, first, last))
                    if last not in reached or found < reached[last][0]:
                        reached[last] = found, [*begins, last]
        best = reached
    return best[blocks]
