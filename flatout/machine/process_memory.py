"""Memory of this process as the kernel counts it: what is resident, page faults, and what such a fault costs.

A page that the process did not have before is cleared by the kernel, at each fault. Every `flatout run` imports this
before the script starts, so it imports hardly anything itself.
"""

from __future__ import annotations

import functools
import mmap
import os
import sys
import time

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

TOUCHED_BYTES = 16 << 20
TIMES = 3
"""The first time costs more in a virtual machine, which gets the memory from its host."""


def resident_bytes() -> int:
    """Resident memory of this process now."""
    if not sys.platform.startswith("linux"):
        return int(_memory_info().rss)
    with open("/proc/self/statm", "rb", buffering=0) as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_resident_bytes() -> int:
    """The most that was ever resident of this process."""
    if resource is None:
        return int(_memory_info().peak_wset)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def minor_faults() -> int:
    """Of this process so far, all threads together."""
    if resource is None:
        return int(_memory_info().num_page_faults)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _memory_info() -> object:  # its fields depend on the system; psutil has no types
    import psutil

    return psutil.Process().memory_info()


@functools.cache
def page_fault_seconds() -> float:
    """Of one minor fault, measured here once, in some 50 ms: with huge pages a fault is rarer and longer."""
    return min(_once() for _ in range(TIMES))


def _once() -> float:
    began, faults = time.perf_counter(), minor_faults()
    with mmap.mmap(-1, TOUCHED_BYTES) as memory:
        for place in range(0, TOUCHED_BYTES, mmap.PAGESIZE):
            memory[place] = 1
    return (time.perf_counter() - began) / max(1, minor_faults() - faults)
