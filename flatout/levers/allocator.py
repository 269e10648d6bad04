"""CPU memory: keep freed memory, instead of returning it to the system and faulting it in again every step.

glibc maps each large tensor when it is allocated and unmaps it when it is freed, so every step pays for zeroing the
same pages. What it keeps is worth moving into huge pages.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from flatout.environment import preloaded_libraries
from flatout.errors import MachineError
from flatout.levers.lever import Lever, Saving, Value, Verdict, offer, refuse
from flatout.levers.observed import Observed
from flatout.levers.subject import Subject
from flatout.machine.description import Machine
from flatout.machine.heap_pages import HeapPages, heap_pages
from flatout.machine.process_memory import page_fault_seconds

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -2, -3, -4
"""malloc.h of glibc."""

LEAST_GROWTH = 128 << 20
"""Of a heap that is worth moving into huge pages, and of one that was moved before."""

PRELOADABLE = ("jemalloc", "tcmalloc", "mimalloc")

UNSEEN_SHARE = 0.3
"""What page faults may take in the next process of a script that has none in this one: it depends on where the heap
is, and was seen to change from one process to the next."""


class RetainMemory(Lever):
    """Let glibc keep freed memory instead of returning it to the system and faulting it in again in every step.

    Where the system gives huge pages on request, a heap that has grown is moved into them, before an update: it then
    takes fewer misses of the address cache to go through large tensors. The peak of the process may grow: under plans
    that have this, by half in BERT-base training and to twice as much in GPT-2's. `flatout tune` prints it before and
    after.
    """

    name = "malloc retains memory"
    plan_field = "allocator"
    names_value = False
    switch = "once"
    """Once mallopt was called, glibc no longer adapts its thresholds: the process can no longer serve as a baseline."""

    def saving(self, machine: Machine, observed: Observed) -> Saving:
        return _saved_faults(observed)

    def applies(self, machine: Machine, observed: Observed) -> Verdict:
        if observed.device != "cpu":
            return refuse("the tensors are on the GPU, whose allocator keeps memory already")
        if any(name in preloaded_libraries() for name in PRELOADABLE):
            return refuse("another allocator is preloaded already")
        if not sys.platform.startswith("linux") or not hasattr(ctypes.CDLL(None), "mallopt"):
            return refuse("the C library has no mallopt")
        return offer("retain", reason="large tensors are mapped and unmapped every step by default")

    @contextlib.contextmanager
    def apply(self, subject: Subject, value: Value) -> Iterator[None]:
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(M_TOP_PAD, 64 << 20)
        pages = heap_pages()
        try:
            with contextlib.nullcontext() if pages is None else subject.before_steps(_moving(pages)):
                yield
        finally:
            if pages is not None:
                pages.close()
            # Where glibc's adaptive thresholds settle once tensors have been allocated and freed.
            libc.mallopt(M_MMAP_MAX, 65536)
            libc.mallopt(M_MMAP_THRESHOLD, 32 << 20)
            libc.mallopt(M_TRIM_THRESHOLD, 64 << 20)
            libc.mallopt(M_TOP_PAD, 128 << 10)
            libc.malloc_trim(0)

    def takes(self, value: Value) -> bool:
        return value == "retain"


def _moving(pages: HeapPages) -> Callable[[], None]:
    """Moves the heap into huge pages before an update, once it has grown. Not around calls of the model: as long as a
    lever wraps those, `flatout run` watches every step, and a step of 2 ms has little to gain here."""
    import torch

    def move() -> None:
        if not torch.compiler.is_compiling() and pages.new_bytes > LEAST_GROWTH:
            pages.move()

    return move


class PreloadedAllocator(Lever):
    """jemalloc, tcmalloc or mimalloc in place of glibc's malloc, where one is installed. It needs a new process."""

    name = "allocator"
    plan_field = "allocator"
    switch = "process"

    def saving(self, machine: Machine, observed: Observed) -> Saving:
        faults = _saved_faults(observed)  # plus what allocating many small tensors costs
        return Saving(expected=faults.expected, least=-0.1, most=min(0.9, faults.most + 0.1))

    def applies(self, machine: Machine, observed: Observed) -> Verdict:
        if observed.device != "cpu":
            return refuse("the tensors are on the GPU")
        if any(name in preloaded_libraries() for name in PRELOADABLE):
            return refuse("one is preloaded already")
        found = [name for name in PRELOADABLE if _library(name)]
        if not found:
            return refuse("none of jemalloc, tcmalloc, mimalloc is installed")
        return offer(*found, reason="it is installed")

    def apply(self, subject: Subject, value: Value) -> AbstractContextManager[None]:
        if str(value) not in preloaded_libraries():
            remedy = "set allocator = 'retain', or start Python with LD_PRELOAD"
            raise MachineError(f"{value} takes the place of malloc only in a new process", remedy=remedy)
        return contextlib.nullcontext()

    def takes(self, value: Value) -> bool:
        return value in PRELOADABLE

    def environment(self, value: Value) -> dict[str, str]:
        library = _library(str(value))
        return {"LD_PRELOAD": library} if library else {}


def _saved_faults(observed: Observed) -> Saving:
    """The time of a step's page faults, which an allocator that keeps its memory avoids."""
    if observed.page_faults_per_step is None or not observed.step_seconds:
        return Saving(expected=0.05, least=-0.05, most=0.5)
    share = min(0.9, observed.page_faults_per_step * page_fault_seconds() / observed.step_seconds)
    most = max(UNSEEN_SHARE, min(0.95, 1.5 * share))
    return Saving(expected=0.7 * share, least=-0.05, most=most, why=f"page faults take about {share:.1%} of a step")


@functools.cache
def _library(name: str) -> str | None:
    """Cached: ctypes starts processes to look it up, some 40 ms in all."""
    return ctypes.util.find_library(name) or (
        ctypes.util.find_library("tcmalloc_minimal") if name == "tcmalloc" else None
    )
