"""Flush denormal fp32 numbers to zero in every compute thread.

A CPU core works on values below 1.2e-38 in microcode, many times slower. The switch is a register of each thread;
`torch.set_flush_denormal` sets it for the calling thread alone, and the OpenMP workers that share the work keep theirs.
So torch's own function is also run once on each worker, through OpenMP's entry point.

    with flush_denormals():
        ...
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from pathlib import Path

from flatout.errors import MachineError

_REGION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
DENORMAL = 1e-40
PARALLEL_ELEMENTS = 1 << 18
"""Enough that torch splits the work over all threads."""
_of_thread = threading.local()
"""`open`: of each context that is open, did the thread flush them when it began?"""


@contextlib.contextmanager
def flush_denormals() -> Iterator[None]:
    """On for every thread within the context. Raises MachineError where some thread cannot be reached."""
    import torch

    known: list[bool] = vars(_of_thread).setdefault("open", [])
    known.append(flushed_here())
    set_in_every_thread(True)
    try:
        if not flushed_everywhere():
            raise MachineError("some compute threads keep denormals", limit="this OpenMP library gives no way in")
        yield
    finally:
        before = known[0]
        known.pop()
        if not known:  # the last of those that overlap
            set_in_every_thread(False)
            torch.set_flush_denormal(before)


def set_in_every_thread(on: bool) -> None:
    """Set the flag of the calling thread and of the OpenMP workers it commands."""
    import torch

    torch.set_flush_denormal(on)
    library = _openmp()
    if library is None or torch.get_num_threads() == 1:
        return

    def region(_: int | None) -> None:
        torch.set_flush_denormal(on)

    callback = _REGION(region)
    library.GOMP_parallel(callback, None, torch.get_num_threads(), 0)


def flushed_here() -> bool:
    """Does the calling thread return 0 for an fp32 product that is denormal?"""
    import torch

    # Not in torch's default dtype, of which DENORMAL may be no denormal, nor on its default device.
    return bool((torch.tensor([DENORMAL], dtype=torch.float32, device="cpu") * 0.5 == 0).all())


def flushed_everywhere() -> bool:
    """Do all threads return 0 for an fp32 product that is denormal?"""
    import torch

    values = torch.full((PARALLEL_ELEMENTS,), DENORMAL, dtype=torch.float32, device="cpu")
    return bool((values * 0.5 == 0).all())


def _openmp() -> ctypes.CDLL | None:
    """The OpenMP runtime that is already loaded; both GNU's and LLVM's export GOMP_parallel."""
    try:
        loaded = Path("/proc/self/maps").read_text().split()
    except OSError:
        return None
    for name in dict.fromkeys(word for word in loaded if "libgomp" in word or "libiomp" in word or "libomp" in word):
        library = ctypes.CDLL(name)
        if hasattr(library, "GOMP_parallel"):
            return library
    return None
