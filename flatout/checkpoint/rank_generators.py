"""Random states of several ranks: each has its own dropout, so a checkpoint holds the states of all.

Rank 0 collects them through the store by which the ranks found one another: not through a collective, which would mix
with those of the training, and would hang where a rank is missing. The others put theirs into the store and continue.

{"python": ..., "torch": ..., "numpy": ..., "cuda": [...],      rank 0's; all there is in a run of one rank
 "cuda_device": 0,                                              which of the GPUs the model was on
 "other_ranks": [{...}, {...}]}                                 those of ranks 1, 2, ...

What another rank than 0 captures holds the states of that rank only, and says so: {..., "rank": 1}. A run may continue
on a GPU of another number, as where each rank sees its own GPU alone: that one then gets the state.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch import distributed, nn

from flatout.checkpoint.structure import join, split
from flatout.data.nested import leaves_in
from flatout.decoding import decode
from flatout.errors import UsageError
from flatout.generators import generator_states, generators_kept, seed_generators
from flatout.machine.device import device_index
from flatout.machine.ranks import joined_rank, joined_ranks
from flatout.parallel.whole_tensors import home_of
from flatout.torch_private.ranks import default_store

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

WAIT_SECONDS = 300.0
"""For the other ranks; less than the 10 minutes after which NCCL would end a rank that went on without this one."""


def states_of_ranks(model: object = None) -> dict[str, object]:
    """This rank's states and, on rank 0, all others'. Every rank calls it, equally often. Raises UsageError.

    model: or models, from which the GPU is known that draws.
    """
    rank, ranks = joined_rank(), joined_ranks()
    states = generator_states()
    if "cuda" in states:
        states["cuda_device"] = _gpu_of(model)
    if ranks == 1:
        return states
    store = default_store()
    number = store.add(f"flatout/captures/{rank}", 1)
    if rank:
        store.set(_key(number, rank), _packed(states).decode())
        return states | {"rank": rank}
    return states | {"other_ranks": [_received(store, number, other) for other in range(1, ranks)]}


@dataclass(frozen=True, kw_only=True)
class _Ranks:
    """What saved states hold besides those of the first rank."""

    rank: int = 0
    other_ranks: tuple[Mapping[str, object], ...] = ()


def states_here(saved: Mapping[str, object], model: object = None) -> tuple[Mapping[str, object], str | None]:
    """(the states that this rank continues from, a warning if the run had another number of ranks).

    model: or models, as they are here.

    A rank whose states were not saved gets states from a seed: the SHA-256 of the first rank's states and its own
    number. So it differs from all others, and is the same whenever that checkpoint is restored.
    """
    rank, ranks = joined_rank(), joined_ranks()
    names = [one.name for one in fields(_Ranks)]
    several = decode(_Ranks, {name: saved[name] for name in names if name in saved})
    first: Mapping[str, object] = {name: value for name, value in saved.items() if name not in names}
    by_rank = {several.rank: first, **dict(enumerate(several.other_ranks, 1))}
    note = None
    if 0 not in by_rank and rank not in by_rank:
        note = f"the random states are those of rank {several.rank} alone, not of rank {rank}, which gets new ones"
    elif rank == 0 and ranks != len(by_rank):
        note = f"ranks whose random states were saved: {len(by_rank)}; ranks here: {ranks}; "
        note += "the additional ones get new states" if ranks > len(by_rank) else "the rest is not used"
    here = by_rank[rank] if rank in by_rank else _derived(first, rank)
    return _on_this_gpu(here, model), note and f"{note}; the run continues, but not bit for bit as it would have"


def _gpu_of(model: object) -> int | None:
    """The number of the first GPU that holds a part of these models, else of the current one; None: CUDA has not
    begun."""
    for _, module in leaves_in(model, "model", lambda value: isinstance(value, nn.Module)):
        for tensor in (*module.parameters(), *module.buffers()):
            if (home := home_of(tensor)).type == "cuda":
                return device_index(home)
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None


def _on_this_gpu(states: Mapping[str, object], model: object) -> Mapping[str, object]:
    """The same with the state of the GPU that the run had at the place of the one that it has now."""
    saved, before = states.get("cuda"), states.get("cuda_device")
    now = _gpu_of(model)
    if not isinstance(saved, list) or not isinstance(before, int) or not 0 <= before < len(saved):
        return states  # none were drawn on a GPU, or an earlier version wrote this
    if now is None or now == before:
        return states
    every = [*saved, *torch.cuda.get_rng_state_all()[len(saved) :]]
    every[now], every[before] = every[before], every[now]
    return {**states, "cuda": every}


def _derived(states: Mapping[str, object], rank: int) -> dict[str, object]:
    digest = hashlib.sha256(_packed(states) + b"rank %d" % rank).digest()
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.init()  # a device initialised later would begin from the seed that all ranks have
    with generators_kept():
        seed_generators(int.from_bytes(digest[:8]) >> 1)
        return generator_states()


def _key(number: int, rank: int) -> str:
    return f"flatout/generators/{number}/{rank}"


def _received(store: Store, number: int, rank: int) -> dict[str, object]:
    key = _key(number, rank)
    try:
        store.wait([key], timedelta(seconds=WAIT_SECONDS))
    except distributed.DistNetworkError:  # the process that held the store is gone
        raise
    except RuntimeError as error:  # each kind of store has its own text for a timeout
        raise UsageError(
            f"capture() was called on rank 0 and, within {WAIT_SECONDS:.0f} s, not on rank {rank}",
            limit="a checkpoint holds the random states of every rank",
            remedy="call capture() on all ranks; Checkpoints.save writes on rank 0 alone",
        ) from error
    packed = store.get(key)
    store.delete_key(key)
    return _unpacked(packed)


def _packed(states: Mapping[str, object]) -> bytes:
    """As in the files, JSON and bytes: nothing that could run code goes from rank to rank either."""
    parts = split({"generators": dict(states)})
    tensors = {name: base64.b64encode(one.numpy().tobytes()).decode() for (_, name), one in parts.tensors.items()}
    return json.dumps([parts.structure, tensors]).encode()


def _unpacked(content: bytes) -> dict[str, object]:
    structure, tensors = json.loads(content)
    stored = {
        ("state", name): torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
        for name, text in tensors.items()
    }
    states = join(structure, stored)["generators"]
    assert isinstance(states, dict), "what _packed was given"
    return states
