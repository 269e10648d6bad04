"""The last layer's scores in a timeline, and what a loss that takes them in chunks would hold instead."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from flatout.memory.timeline import Allocation

LEAST_CLASSES = 1024
CHUNK_COPIES = 2
"""A chunk's scores, and one temporary of their size."""


def chunked_sizes(allocations: Mapping[int, Allocation]) -> dict[int, int]:
    """Allocation's index -> bytes held instead, for every copy of the scores that a cross-entropy made or read.

    Empty where there is none, or where the layer's weights are not known. A copy is recognised by its shape: that of
    a log-softmax with a gradient, or at least half of it (scores are shifted by a token, or masked).
    """
    from flatout.kernels.linear_cross_entropy import CHUNK_BYTES  # which needs torch; a reader of a report does not

    sizes: dict[int, int] = {}
    for index, one in allocations.items():
        if _name(one) != "_log_softmax" or len(one.shape) != 2 or one.shape[1] < LEAST_CLASSES:
            continue
        rows, classes = one.shape
        copies = {
            other: found
            for other, found in allocations.items()
            if found.step == one.step and _is_copy(found, rows, classes)
        }
        features = _features(allocations.values(), classes)
        if features is None or not any(_name(found) == "nll_loss_backward" for found in copies.values()):
            continue
        chunk = CHUNK_COPIES * 4 * classes * min(rows, max(1, CHUNK_BYTES // (4 * classes)))
        gradients = 4 * features * (classes + rows)  # made with the loss, in fp32, and held until the backward pass
        sizes |= dict.fromkeys(copies, 0)
        sizes[index] = chunk + gradients
        last = max(copies, key=lambda other: copies[other].born)
        sizes[last] = gradients if last != index else chunk + 2 * gradients  # scaled into new ones there
    return sizes


def _name(one: Allocation) -> str:
    """The operation without its overload."""
    return one.operation.partition(".")[0]


def _is_copy(one: Allocation, rows: int, classes: int) -> bool:
    if one.category in ("weights", "gradients", "optimizer") or not one.shape or one.shape[-1] != classes:
        return False
    return rows <= 2 * math.prod(one.shape[:-1]) <= 4 * rows


def _features(allocations: Iterable[Allocation], classes: int) -> int | None:
    """Inputs of the widest weight matrix with that number of classes."""
    found = [
        math.prod(one.shape) // classes
        for one in allocations
        if one.category == "weights" and len(one.shape) == 2 and classes in one.shape
    ]
    return max(found, default=None)
