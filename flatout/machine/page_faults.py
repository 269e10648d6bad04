"""What it costs to get memory that this process did not have before: the kernel clears a page for each fault."""

from __future__ import annotations

import functools
import mmap
import time

from flatout.machine.own_process import minor_faults

TOUCHED_BYTES = 16 << 20
TIMES = 3
"""The first time costs more in a virtual machine, which gets the memory from its host."""


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
