"""The heap of this process in huge pages: fewer misses of the processor's address cache, and fewer page faults.

Most systems give huge pages only to memory for which they were requested (`madvise`), and glibc requests none. Linux
from 6.1 on also moves memory that is in small pages already into huge ones.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

MADV_HUGEPAGE, MADV_NOHUGEPAGE, MADV_COLLAPSE = 14, 15, 25
"""Of mman.h; the last one since Linux 6.1."""
SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
MAPS = Path("/proc/self/maps")


def given_on_request() -> bool:
    """Does the system give huge pages to memory for which they are requested, and to no other?"""
    try:
        return "[madvise]" in (SETTINGS / "enabled").read_text()
    except OSError:
        return False


class HeapPages:
    """Moves the heap into huge pages, as it grows."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        self._libc.sbrk.restype = ctypes.c_void_p
        self._libc.sbrk.argtypes = [ctypes.c_ssize_t]
        self._libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self._size = _huge_page_bytes()
        self._begin = self._moved = -(-_heap_begin() // self._size) * self._size  # the first whole page

    @property
    def new_bytes(self) -> int:
        """By how much the heap has grown since it was moved last. Takes less than a microsecond."""
        return int(self._libc.sbrk(0) or 0) - self._moved

    def move(self) -> None:
        """Move what has grown since. A second takes some GB; where there are no huge pages left, nothing happens."""
        end = int(self._libc.sbrk(0) or 0) // self._size * self._size
        if end > self._moved:
            self._libc.madvise(self._moved, end - self._moved, MADV_HUGEPAGE)
            self._libc.madvise(self._moved, end - self._moved, MADV_COLLAPSE)
            self._moved = end

    def close(self) -> None:
        """Request no huge pages for the heap any more; it keeps those that it has."""
        if self._moved > self._begin:
            self._libc.madvise(self._begin, self._moved - self._begin, MADV_NOHUGEPAGE)


def heap_pages() -> HeapPages | None:
    """None where the system gives no huge pages on request, or has no heap of that kind."""
    if not sys.platform.startswith("linux") or not given_on_request() or not _heap_begin():
        return None
    return HeapPages()


def _heap_begin() -> int:
    """Where the heap begins; 0: there is none."""
    try:
        heap = next((line for line in MAPS.read_text(errors="replace").splitlines() if line.endswith("[heap]")), "0-0")
    except OSError:
        return 0
    return int(heap.partition("-")[0], 16)


def _huge_page_bytes() -> int:
    try:
        return int((SETTINGS / "hpage_pmd_size").read_text())
    except (OSError, ValueError):
        return 2 << 20
