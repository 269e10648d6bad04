"""Batches made by worker processes, and how many workers are worth having.

In the main process a step waits for its batch; workers make it in the meantime, but cost a copy, and take cores from
the training. So their number follows from measurements: none until making batches turns out to slow the steps down,
then as many as keep up with them, and none again if the loop got no faster.
"""

from __future__ import annotations

import math
import multiprocessing
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from flatout.data.nested import tensors_in
from flatout.data.sources import Source
from flatout.statistics import median
from flatout.units import format_bytes

if TYPE_CHECKING:
    from torch import Tensor
    from torch.utils.data import DataLoader

T = TypeVar("T")
Key: TypeAlias = "tuple[int, Tensor]"
"""(the epoch's seed, indices): what a worker needs to make a batch."""

PROBED_BATCHES = 8
WAIT_SHARE_WORTH_WORKERS = 0.1
SECONDS_WORTH_WORKERS = 2e-3
"""A batch that takes less time to make costs more to send between processes."""
LEAST_GAIN = 1.05
LEAST_PREFETCHED, MOST_PREFETCHED = 2, 8
"""Batches that a worker holds ready; each takes its memory."""
SHARED_MEMORY = Path("/dev/shm")
"""Workers leave their batches there on Linux; full, it kills them."""


class _Dataset:
    """A source as a data set whose items are whole batches."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __getitem__(self, key: Key) -> object:
        return self._source.batch(key[1], key[0])


class Workers:
    """`count` processes that make batches ahead, in order.

    They have the data set as it is when an epoch begins; with `persistent`, as it was when the first epoch began.
    """

    def __init__(
        self, source: Source, count: int, *, prefetch_factor: int | None, pin_memory: bool, persistent: bool = False
    ) -> None:
        import torch
        from torch.utils.data import DataLoader

        self._keys: list[Key] = []
        """Replaced in place for each epoch, so that workers can persist between epochs."""
        self._busy = False
        self._loader_of: Callable[..., DataLoader[object]] = partial(
            DataLoader,
            _Dataset(source),  # type: ignore[arg-type]
            batch_size=None,
            collate_fn=_as_it_is,  # torch's default makes tensors of arrays, and lists of tuples
            num_workers=count,
            prefetch_factor=prefetch_factor,
            pin_memory=pin_memory,
            worker_init_fn=_leave_interrupts_to_the_main_process,
            generator=torch.Generator(),  # its seeds for workers must not move the training's random numbers
        )
        self._loader: DataLoader[object] = self._loader_of(sampler=self._keys, persistent_workers=persistent)

    def batches(self, keys: Sequence[Key]) -> Iterator[object]:
        """An evaluation may ask for other ones meanwhile: workers that persist would begin anew for it, so it gets
        processes of its own."""
        if self._busy:
            yield from self._loader_of(sampler=list(keys))
            return
        self._keys[:], self._busy = keys, True
        try:
            yield from self._loader
        finally:
            self._busy = False


def _as_it_is(batch: object) -> object:
    return batch


def _leave_interrupts_to_the_main_process(worker: int) -> None:
    """A terminal sends Ctrl-C to all processes, but the main process may still need the batches under way."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def start_method() -> str:
    """How a process is started here where nothing else was said. Asking does not settle it."""
    return multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]


def _workers_that_fit(batch: object, cores: int) -> int:
    """How many workers have room for the batches that they hold ready."""
    size = sum(tensor.nbytes for _, tensor in tensors_in(batch) if hasattr(tensor, "nbytes"))
    if not size or not SHARED_MEMORY.is_dir():
        return cores
    return shutil.disk_usage(SHARED_MEMORY).free // ((MOST_PREFETCHED + 1) * size)


class Pacing:
    """How long the loop waits for a batch and how long it takes to use it, and what follows for the workers."""

    def __init__(self, cores: int) -> None:
        self.cores = cores
        self.count = 0
        self.prefetch_factor: int | None = None
        """Batches that each worker holds ready: as many as are used while the slowest batch is made."""
        self.reason = "nothing was measured yet"
        self.decided = cores < 2
        self._made: list[float] = []
        self._used: list[float] = []
        self._without: float | None = None
        if self.decided:
            self.reason = "one core: a worker would take it from the training"

    def timed(self, batches: Iterable[T]) -> Iterator[T]:
        """The same batches, timed until there is something to decide; ends early where a change is due."""
        iterator = iter(batches)
        while True:
            start = time.perf_counter()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            middle = time.perf_counter()
            yield batch
            if self.decided:
                continue
            self._made.append(middle - start)
            self._used.append(time.perf_counter() - middle)
            if len(self._made) >= PROBED_BATCHES + 1 and self._decide(batch):
                return

    def give_up(self, reason: str) -> None:
        """No workers from now on."""
        self.decided, self.count, self.reason = True, 0, reason

    def _decide(self, batch: object) -> bool:
        """True if the number of workers changes now. The first batch is not typical."""
        made, used, slowest = median(self._made[1:]), median(self._used[1:]), max(self._made[1:])
        self._made, self._used = [], []
        if self._without is not None:
            return self._judge(made + used)
        if made < SECONDS_WORTH_WORKERS or made < WAIT_SHARE_WORTH_WORKERS * (made + used):
            self.decided = True
            self.reason = f"a batch takes {made * 1e3:.2f} ms to make and {used * 1e3:.2f} ms to use"
            return False
        most = min(self.cores - 1, _workers_that_fit(batch, self.cores))
        if most < 1:
            free = format_bytes(shutil.disk_usage(SHARED_MEMORY).free)
            self.give_up(f"{SHARED_MEMORY} has {free} free: too little for the batches of a worker")
            return False
        self.count = max(1, min(most, math.ceil(made / max(used, 1e-6))))
        self._without = made + used
        between = max(used, made / self.count)  # seconds between two batches that leave the workers
        ready = math.ceil(slowest / between / self.count) + 1
        self.prefetch_factor = min(MOST_PREFETCHED, max(LEAST_PREFETCHED, ready))
        self.reason = f"a batch takes {made * 1e3:.1f} ms to make and {used * 1e3:.1f} ms to use, on {self.cores} cores"
        return True

    def _judge(self, with_workers: float) -> bool:
        assert self._without is not None
        self.decided = True
        if self._without >= LEAST_GAIN * with_workers:
            return False
        self.reason = (
            f"with {self.count} workers a step took {with_workers * 1e3:.1f} ms, without {self._without * 1e3:.1f} ms"
        )
        self.count = 0
        return True
