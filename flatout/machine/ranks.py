"""Which of the processes of a run this one is.

    here = flatout.ranks()                # under `flatout launch`, torchrun, or a launcher that sets the same variables
    model = Model().to(here.device)
    if here.first:
        print("only once")

A process that no launcher started is alone: rank 0 of 1, so that the same script runs with plain `python` too.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar, cast

from flatout import environment
from flatout.errors import MachineError, UsageError, describe_error

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

TIMEOUT_SECONDS = 600.0
"""How long a rank waits in a collective for one that does not arrive."""
THREADS_SECONDS = 5.0
"""How long a process that ends waits at most for gloo's threads to be idle."""
IDLE_LOOKS = 3
"""They are idle when they are so in this many looks, 1 ms apart: one that waits for the GIL seems idle too."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among those that train together."""

    rank: int
    """Its number, from 0."""
    count: int
    """How many there are, on all machines."""
    local_rank: int
    """Its number on this machine."""
    device: torch.device
    """The GPU with the number of the local rank; the CPU where there is none."""

    @property
    def first(self) -> bool:
        """Is it the one that prints and writes files?"""
        return self.rank == 0


def ranks(*, timeout_seconds: float = TIMEOUT_SECONDS) -> Ranks:
    """This process's place among its ranks; begins torch.distributed if a launcher started it and nothing else did.

    TrainStep and `batches` with a plan that sets `parallel` call it themselves. timeout_seconds: how long a collective
    waits for a rank, where torch.distributed is begun here.

    Raises UsageError where a launcher's variables are incomplete or there are fewer GPUs than ranks on this machine,
    MachineError where the ranks do not find each other.
    """
    import torch
    from torch import distributed

    _check_timeout(timeout_seconds)
    if not distributed.is_available():
        return Ranks(rank=0, count=1, local_rank=0, device=_device(0))
    if not distributed.is_initialized():
        place = environment.launched()
        if place is None:
            _warn_of_others()
            return Ranks(rank=0, count=1, local_rank=0, device=_device(0))
        _begin(timeout_seconds)
    rank = distributed.get_rank()
    local = environment.local_rank() if _exchange is None else 0  # a pretended one has a device like this one
    device = torch.device("cpu") if distributed.get_backend() == "gloo" else _device(rank if local is None else local)
    return Ranks(rank=rank, count=distributed.get_world_size(), local_rank=local or 0, device=device)


def joined() -> bool:
    """Has torch.distributed begun in this process?"""
    from torch import distributed

    return distributed.is_available() and distributed.is_initialized()


def joined_rank() -> int:
    """Which of these ranks this process is; 0 where torch.distributed has not begun."""
    from torch import distributed

    return distributed.get_rank() if joined() else 0


def joined_ranks() -> int:
    """How many ranks have joined this process in torch.distributed; 1 where it has not begun."""
    from torch import distributed

    return distributed.get_world_size() if joined() else 1


def _warn_of_others() -> None:
    """Processes that srun or mpirun starts without a launcher's variables do not know of one another."""
    found = environment.started_together()
    if found is not None and not _warned:
        _warned.append(True)
        warnings.warn(
            f"{found[0]} is {found[1]}, and RANK is not set: each of these processes is alone, and trains by itself. "
            "Let srun or mpirun start one process on each machine, flatout launch (flatout launch --manifest slurm "
            "prints such a script); or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for each",
            stacklevel=3,
        )


_warned: list[bool] = []


def _check_timeout(value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UsageError(f"timeout_seconds is {value!r}", limit="it is a finite number above 0", remedy="pass 600")


def _begin(timeout_seconds: float) -> None:
    import torch
    from torch import distributed

    backend = "gloo"
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(_device(environment.local_rank() or 0))
    try:
        distributed.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds))
    except (RuntimeError, ValueError) as error:
        said = describe_error(error)
        if "NCCL" in said:
            raise MachineError(
                f"NCCL did not start: {said}",
                limit="ranks with GPUs send to each other by it",
                remedy="find what fails on this machine: NCCL_DEBUG=INFO flatout launch --check",
            ) from error
        raise MachineError(
            f"the ranks did not find each other: {said}",
            limit="each connects to MASTER_ADDR and MASTER_PORT",
            remedy="start them with: flatout launch train.py",
        ) from error
    atexit.register(end_ranks)


def end_ranks() -> None:
    """End torch.distributed in this process, and wait for its threads; never raises. Nothing where it has not begun.

    A thread of gloo that still lets go of the last collective's tensors while the interpreter ends aborts the process
    ("terminate called without an active exception", pytorch/pytorch#190489). The threads end with the last reference
    to the group. A model that holds it may be in a cycle, or live to the end of the process.
    """
    from torch import distributed

    if not distributed.is_available():
        return
    from torch.distributed.distributed_c10d import is_initialized  # that of torch.distributed denies a script's ranks

    from flatout.torch_private.ranks import gloo_works

    if not is_initialized():
        return
    with contextlib.suppress(Exception):
        distributed.destroy_process_group()
    gc.collect()
    end = time.monotonic() + THREADS_SECONDS
    idle = 0
    while idle < IDLE_LOOKS and time.monotonic() < end:
        time.sleep(0.001)  # lets go of the GIL, which they need
        idle = 0 if gloo_works() else idle + 1


def _device(local_rank: int) -> torch.device:
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= (count := torch.cuda.device_count()):
        raise UsageError(
            f"this is rank {local_rank} of those on this machine, which has {count} GPU{'s' * (count != 1)}",
            limit="each rank has a GPU of its own",
            remedy=f"start {count} on this machine: flatout launch --nproc-per-node {count} train.py",
        )
    return torch.device("cuda", local_rank)


class PretendedExchange:
    """The values that ranks would exchange, where one after the other is pretended. Each hears what another said at the
    same place in its own turn; its own value from those that had none yet, as from later ranks in a first round."""

    def __init__(self, stand_in: Callable[[int], int] = lambda rank: rank) -> None:
        """stand_in: of a rank, the one that is pretended in its place."""
        self._stand_in = stand_in
        self._said: dict[int, list[object]] = {}
        self._now: list[object] = []

    def begin(self) -> None:
        """A rank's turn."""
        self._now = []

    def end(self, rank: int) -> None:
        """That was the turn of this rank."""
        self._said[rank] = self._now

    def values(self, value: T, count: int, rank: int) -> list[T]:
        """What each of `count` ranks says, where `rank` says `value`."""
        place = len(self._now)
        self._now.append(value)

        def of(other: int) -> T:
            said = self._said.get(self._stand_in(other), ())
            return cast(T, said[place]) if other != rank and place < len(said) else value

        return [of(other) for other in range(count)]


_exchange: PretendedExchange | None = None


def pretended_exchange() -> PretendedExchange | None:
    """That of the rank that this process is pretended to be; None: ranks are real."""
    return _exchange


@contextlib.contextmanager
def pretended_ranks(count: int, rank: int = 0, exchange: PretendedExchange | None = None) -> Iterator[None]:
    """This process as one rank of `count`, until the context ends: collectives return at once and move nothing, so that
    on fake tensors a step runs as one rank of many would run it. 1: nothing is pretended.

    exchange: through which values are exchanged; None: all ranks are as this one. Raises UsageError in a process that
    is one of several ranks already.
    """
    global _exchange
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
    hook = sys.excepthook
    distributed.init_process_group("fake", rank=rank, world_size=count, store=pretended_store())
    _exchange = exchange or PretendedExchange()
    _exchange.begin()
    try:
        yield
    finally:
        _exchange.end(rank)
        _exchange = None
        distributed.destroy_process_group()
        sys.excepthook = hook  # torch's own, which names the rank, would stay
