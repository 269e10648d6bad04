"""Random states of several ranks: each has its own dropout, so a checkpoint holds the states of all.

Rank 0 collects them through the store by which the ranks found one another: not through a collective, which would mix
with those of the training, and which ends, where a rank is missing, in a hang. The others put theirs there and go on.

{"python": ..., "torch": ..., "numpy": ..., "cuda": [...],      rank 0's; all there is in a run of one rank
 "other_ranks": [{...}, {...}]}                                 those of ranks 1, 2, ...

Elsewhere than on rank 0 what is captured holds that rank's states alone, and says so: {..., "rank": 1}.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from flatout.checkpoint.structure import join, split
from flatout.errors import UsageError
from flatout.generators import generator_states, generators_kept, seed_generators

WAIT_SECONDS = 300.0
"""For the other ranks; less than the 10 minutes after which NCCL would end a rank that went on without this one."""


def rank_and_ranks() -> tuple[int, int]:
    """(this process, of how many): (0, 1) without torch.distributed."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def states_of_ranks() -> dict[str, Any]:
    """This rank's states and, on rank 0, all others'. Every rank calls it, equally often. Raises UsageError."""
    rank, ranks = rank_and_ranks()
    states = generator_states()
    if ranks == 1:
        return states
    store = _store()
    number = store.add(f"flatout/captures/{rank}", 1)
    if rank:
        store.set(_key(number, rank), _packed(states))
        return states | {"rank": rank}
    return states | {"other_ranks": [_received(store, number, other) for other in range(1, ranks)]}


def states_here(saved: Mapping[str, Any]) -> tuple[Mapping[str, Any], str | None]:
    """(the states that this rank goes on from, what to say if the run had another number of ranks).

    A rank that has none in there gets such as follow from a seed: the SHA-256 of those that come first in there and
    of the rank. So it differs from all others, and is the same whenever that checkpoint is taken up.
    """
    rank, ranks = rank_and_ranks()
    first = {name: value for name, value in saved.items() if name not in ("other_ranks", "rank")}
    by_rank = {saved.get("rank", 0): first, **dict(enumerate(saved.get("other_ranks", []), 1))}
    note = None
    if 0 not in by_rank and rank not in by_rank:
        note = f"the random states are those of rank {saved['rank']} alone, not of rank {rank}, which gets new ones"
    elif rank == 0 and ranks != len(by_rank):
        note = f"ranks whose random states were saved: {len(by_rank)}; ranks here: {ranks}; "
        note += "the further ones get new states" if ranks > len(by_rank) else "the rest is not taken up"
    here = by_rank[rank] if rank in by_rank else _derived(first, rank)
    return here, note and f"{note}; the run goes on, but not bit for bit as it would have"


def _derived(states: Mapping[str, Any], rank: int) -> dict[str, Any]:
    digest = hashlib.sha256(_packed(states) + b"rank %d" % rank).digest()
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.init()  # a device that wakes up later would begin from the seed that all ranks have
    with generators_kept():
        seed_generators(int.from_bytes(digest[:8]) >> 1)
        return generator_states()


def _key(number: int, rank: int) -> str:
    return f"flatout/generators/{number}/{rank}"


def _received(store: Any, number: int, rank: int) -> dict[str, Any]:
    key = _key(number, rank)
    try:
        store.wait([key], timedelta(seconds=WAIT_SECONDS))
    except distributed.DistNetworkError:  # the process that held the store is gone
        raise
    except RuntimeError as error:  # each kind of store says in its own way that the time is over
        raise UsageError(
            f"capture() was called on rank 0 and, within {WAIT_SECONDS:.0f} s, not on rank {rank}",
            limit="a checkpoint holds the random states of every rank",
            remedy="call capture() on all ranks; Checkpoints.save writes on rank 0 alone",
        ) from error
    packed = store.get(key)
    store.delete_key(key)
    return _unpacked(packed)


def _store() -> Any:
    from flatout.torch_private.ranks import default_store

    return default_store()


def _packed(states: Mapping[str, Any]) -> bytes:
    """As the files have it, JSON and bytes: nothing that could run code goes from rank to rank either."""
    parts = split({"generators": dict(states)})
    tensors = {name: base64.b64encode(one.numpy().tobytes()).decode() for (_, name), one in parts.tensors.items()}
    return json.dumps([parts.structure, tensors]).encode()


def _unpacked(content: bytes) -> dict[str, Any]:
    structure, tensors = json.loads(content)
    stored = {
        ("state", name): torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
        for name, text in tensors.items()
    }
    states: dict[str, Any] = join(structure, stored)["generators"]
    return states
