"""CPU memory: keep what was freed, instead of giving it back to the system and faulting it in again every step.

glibc maps each large tensor anew and unmaps it when it is freed, so every step pays for zeroing the same pages.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from flatout.environment import preloaded_libraries
from flatout.levers.lever import Lever, Verdict, offer, refuse
from flatout.levers.observed import Observed
from flatout.levers.subject import Subject
from flatout.machine.description import Machine

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -2, -3, -4
"""malloc.h of glibc."""

PRELOADABLE = ("jemalloc", "tcmalloc", "mimalloc")


class RetainMemory(Lever):
    """glibc told to serve large tensors from its heap and to keep that heap."""

    name = "memory kept by malloc"
    plan_field = "allocator"
    exactness = "bit-identical"

    def applies(self, machine: Machine, observed: Observed) -> Verdict:
        if observed.device != "cpu":
            return refuse("the tensors live on the GPU, whose allocator keeps memory already")
        if any(name in preloaded_libraries() for name in PRELOADABLE):
            return refuse("another allocator is preloaded already")
        if not sys.platform.startswith("linux") or not hasattr(ctypes.CDLL(None), "mallopt"):
            return refuse("the C library has no mallopt")
        return offer("retain", reason="large tensors are mapped and unmapped every step by default")

    @contextlib.contextmanager
    def apply(self, subject: Subject, value: Any) -> Iterator[None]:
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(M_TOP_PAD, 64 << 20)
        try:
            yield
        finally:
            # Where glibc's adaptive thresholds settle by themselves once tensors have come and gone.
            libc.mallopt(M_MMAP_MAX, 65536)
            libc.mallopt(M_MMAP_THRESHOLD, 32 << 20)
            libc.mallopt(M_TRIM_THRESHOLD, 64 << 20)
            libc.mallopt(M_TOP_PAD, 128 << 10)
            libc.malloc_trim(0)

    def takes(self, value: Any) -> bool:
        return value == "retain"

    def label(self, value: Any) -> str:
        return self.name


class PreloadedAllocator(Lever):
    """Another allocator, where one is installed; only a new process can have it."""

    name = "allocator"
    plan_field = "allocator"
    exactness = "bit-identical"
    switch = "process"

    def applies(self, machine: Machine, observed: Observed) -> Verdict:
        if observed.device != "cpu":
            return refuse("the tensors live on the GPU")
        if any(name in preloaded_libraries() for name in PRELOADABLE):
            return refuse("one is preloaded already")
        found = [name for name in PRELOADABLE if _library(name)]
        if not found:
            return refuse("none of jemalloc, tcmalloc, mimalloc is installed")
        return offer(*found, reason="it is installed")

    def apply(self, subject: Subject, value: Any) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def takes(self, value: Any) -> bool:
        return value in PRELOADABLE

    def environment(self, value: Any) -> dict[str, str]:
        library = _library(value)
        return {"LD_PRELOAD": library} if library else {}


def _library(name: str) -> str | None:
    return ctypes.util.find_library(name) or (
        ctypes.util.find_library("tcmalloc_minimal") if name == "tcmalloc" else None
    )
