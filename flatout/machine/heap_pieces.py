"""Freed pieces of malloc's heap: what an import leaves behind, and what a training loop with quick steps pays for.

Importing a module frees a few hundred pieces between those that stay. Small tensors then go into these pieces, all over
the heap, instead of side by side at its end: under `flatout run` steps of 0.7 ms took about 2 % longer, and as long as
in a plain process once the pieces were filled (`python -m benchmarks.watch.processes`; a Xeon with AMX, glibc 2.36).
Every `flatout run` imports this before the script starts, so it imports hardly anything itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, Protocol

MOST_BYTES = 2 << 20
"""Held in all, until the process ends. About 1 MB was found in processes that train a small model."""
LARGEST_PIECE, SMALLEST_PIECE = 96 << 10, 24
"""From 128 KiB on malloc maps memory of its own, unless that was changed; 24 is its smallest piece."""
FINE_BELOW, ALIGNMENT = 1200, 16
"""Pieces smaller than this are tried in each size there is (multiples of 16, plus 8), larger ones in steps of 10 %."""


class _HeapInfo(Protocol):
    """The fields of `struct mallinfo2` that are read here, in bytes."""

    arena: int
    keepcost: int


class _Glibc(NamedTuple):
    malloc: Callable[[int], int | None]
    free: Callable[[int | None], None]
    sbrk: Callable[[int], int]
    mallinfo2: Callable[[], _HeapInfo]


@functools.cache
def fill_freed_pieces(most_bytes: int = MOST_BYTES) -> int:
    """Take the freed pieces of malloc's main heap, the largest first, and hold them until the process ends.

    So what is allocated from now on is side by side after them. Done once a process, in some 0.5 ms; what the script
    frees later is its own. Returns the bytes taken: 0 where malloc is not glibc's (2.33 or later).
    """
    libc = _glibc()
    if libc is None:
        return 0
    info, end = libc.mallinfo2(), libc.sbrk(0)
    # `arena` counts all arenas, so the main heap may start later; but memory that malloc gets elsewhere is far from it.
    start = end - info.arena
    top = end - info.keepcost  # what is above was never in use, or is one piece again
    taken, size = 0, LARGEST_PIECE
    while size >= SMALLEST_PIECE and taken < most_bytes:
        place = libc.malloc(size)
        if place is not None and start <= place < top:
            taken += size
            continue
        libc.free(place)
        size = size * 9 // 10 if size > FINE_BELOW else (size - 1) // ALIGNMENT * ALIGNMENT - 8
    return taken


@functools.cache
def _glibc() -> _Glibc | None:
    import ctypes  # torch has imported it

    class Info(ctypes.Structure):
        """`struct mallinfo2` of malloc.h."""

        _fields_ = [
            (name, ctypes.c_size_t)
            for name in (
                *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
                *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
            )
        ]

    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        return None
    # With prototypes of our own, as others may declare types for the same functions; holding the GIL, as hundreds of
    # calls would otherwise wait for every other thread of the script in turn.
    return _Glibc(
        ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(("malloc", library)),
        ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(("free", library)),
        ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t)(("sbrk", library)),
        ctypes.PYFUNCTYPE(Info)(("mallinfo2", library)),
    )
