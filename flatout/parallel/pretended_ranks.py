"""This process as the first of several ranks that are not there: their collectives return at once and move nothing.

So that on fake tensors a step is run as one rank of many would run it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from flatout.errors import UsageError


@contextlib.contextmanager
def pretended_ranks(count: int) -> Iterator[None]:
    """Rank 0 of `count`, until the context ends. 1: nothing is pretended.

    Raises UsageError in a process that is one of several ranks already.
    """
    if count == 1:
        yield
        return
    from torch import distributed

    from flatout.torch_private.ranks import pretended_store

    if distributed.is_initialized():
        raise UsageError(
            "this process is one of several ranks",
            limit="others are pretended in a process that is alone",
            remedy="forecast in a script that is not launched",
        )
    distributed.init_process_group("fake", rank=0, world_size=count, store=pretended_store())
    try:
        yield
    finally:
        distributed.destroy_process_group()
