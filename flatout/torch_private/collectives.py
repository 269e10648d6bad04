"""What a process calls to exchange tensors with other ranks, and to wait for that. Importing this imports
torch.distributed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from torch.distributed import ProcessGroup, Work

from flatout.torch_private.lookup import private

queue_callback: Callable[[Callable[[], None]], None] = private(
    "torch.autograd.Variable._execution_engine.queue_callback"
)
"""Called in a backward pass: run this once all gradients of the pass are there, in the order of these calls. DDP and
FSDP wait for their last collectives in such callbacks."""

_COLLECTIVES = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "barrier"),
    *("allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced", "gather", "scatter"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "alltoall", "alltoall_base"),
    *("send", "recv", "recv_anysource"),
)
"""Every function of torch.distributed ends in one of these; those that are called by another name wait all the same."""


def exchanging_calls() -> list[tuple[object, str]]:
    """(owner, name) of the calls in which a process may wait for other ranks: a collective where its backend is waited
    for at once, the wait for one that runs, and the wait of functional collectives, where those are in use."""
    found: list[tuple[object, str]] = [(ProcessGroup, name) for name in _COLLECTIVES if hasattr(ProcessGroup, name)]
    found.append((Work, "wait"))
    functional = sys.modules.get("torch.distributed._functional_collectives")
    if hasattr(functional, "wait_tensor"):
        found.append((functional, "wait_tensor"))
    return found
