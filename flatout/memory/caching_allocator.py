"""What a GPU would show as reserved, computed without one: torch's CUDA caching allocator, simulated.

Torch asks the driver for segments, cuts blocks out of them and keeps freed blocks for the next request. So a GPU shows
the reserved bytes, not the allocated ones. The rules, as in torch 2.13 (c10/cuda/CUDACachingAllocator.cpp):

- A request is rounded up to 512 bytes, or by `roundup_power2_divisions`. Up to 1 MiB it is small. Small and large
  blocks come from separate pools, and every stream has its own.
- The smallest free block that fits is taken, of equals the one at the lowest address. The rest is split off
  where it is at least 512 bytes (small) or more than 1 MiB (large, below `max_split_bytes`).
- Else a new segment: 2 MiB for small ones, 20 MiB for less than 10 MiB, else the request rounded up to 2 MiB. With
  expandable segments instead: one range of addresses per pool, in which pages of 2 MiB (small) or 20 MiB are mapped.
- A freed block is merged with its free neighbours.

The device has no limit here: nothing is ever released to the driver. The tests replay runs of torch 2.13's own library
above a stand-in for the CUDA runtime, recorded event by event. It cannot know what a device decides: which address a
segment gets (here they ascend, which matters only between blocks of equal size), and when a tensor used on other
streams (`record_stream`) is free. The CUDA context's own memory is not included.

>>> allocator = CachingAllocator(AllocatorSettings())
>>> weights = allocator.allocate(3_000_000)
>>> allocator.allocated_bytes, allocator.reserved_bytes
(3000320, 20971520)
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort

from flatout.memory.allocator_settings import MIB, MIN_BLOCK_BYTES, AllocatorSettings, rounded_up

SMALL_BYTES = MIB
"""The largest small request (torch's kSmallSize)."""
SMALL_SEGMENT_BYTES = 2 * MIB
_LARGE_ALONE_BYTES = 10 * MIB  # from here on a request gets a segment of its own (kMinLargeAlloc)
_LARGE_MULTIPLE_BYTES = 2 * MIB  # to which such a segment is rounded up (kRoundLarge)
_RANGE_BYTES = 1 << 60  # addresses of a pool


class Pool:
    """The free blocks of one kind on one stream."""

    __slots__ = ("end", "free", "last", "page_bytes", "small")

    def __init__(self, *, small: bool, page_bytes: int, begin: int) -> None:
        self.small, self.page_bytes = small, page_bytes
        self.free: list[tuple[int, int, Block]] = []  # ascending (size, address): the order of the best fit
        self.last: Block | None = None  # the one at the highest address
        self.end = begin

    def insert(self, block: Block) -> None:
        insort(self.free, (block.size, block.address, block))

    def remove(self, block: Block) -> None:
        del self.free[bisect_left(self.free, (block.size, block.address))]


class Block:
    """A part of a segment, linked to its neighbours in the same segment. Sizes in bytes."""

    __slots__ = ("address", "allocated", "following", "pool", "previous", "size")

    def __init__(self, address: int, size: int, pool: Pool, previous: Block | None = None) -> None:
        self.address, self.size, self.pool, self.previous = address, size, pool, previous
        self.allocated = False
        self.following: Block | None = None
        if previous is not None:
            previous.following = self

    def cut(self, size: int) -> Block:
        """Split the front off a block that is in no list of the pool; the rest goes into it."""
        front = Block(self.address, size, self.pool, self.previous)
        front.following, self.previous = self, front
        self.address += size
        self.size -= size
        self.pool.insert(self)
        return front

    def merge(self) -> None:
        """With its free neighbours."""
        before, after = self.previous, self.following
        if before is not None and not before.allocated:
            self.pool.remove(before)
            self.address, self.size, self.previous = before.address, before.size + self.size, before.previous
            if self.previous is not None:
                self.previous.following = self
        if after is not None and not after.allocated:
            self.pool.remove(after)
            self.size, self.following = self.size + after.size, after.following
            if self.following is not None:
                self.following.previous = self
            elif after is self.pool.last:
                self.pool.last = self


class CachingAllocator:
    """A device's memory as torch manages it. Streams are any numbers, 0 the default one."""

    def __init__(self, settings: AllocatorSettings) -> None:
        self.settings = settings
        self.allocated_bytes = 0
        """In blocks that are in use, rounding included."""
        self.reserved_bytes = 0
        """In segments: what the device shows as used, but for the context."""
        self.pools: dict[tuple[bool, int], Pool] = {}
        """By (are its blocks small?, stream)."""
        self._max_split = math.inf if settings.max_split_bytes is None else settings.max_split_bytes
        rounding = settings.max_non_split_rounding_bytes
        self._max_rounding = settings.large_segment_bytes if rounding is None else rounding

    def allocate(self, size_bytes: int, stream: int = 0) -> Block:
        """A block for a request above 0 bytes."""
        size = self.settings.rounded_bytes(size_bytes)
        pool = self._pool(size <= SMALL_BYTES, stream)
        block = self._cached(pool, size) or self._new(pool, size)
        rest = block.size - size
        if rest >= MIN_BLOCK_BYTES and (
            pool.small or self.settings.expandable_segments or (rest > SMALL_BYTES and size < self._max_split)
        ):
            block = block.cut(size)
        block.allocated = True
        self.allocated_bytes += block.size
        return block

    def free(self, block: Block) -> None:
        """Return a block to its pool, merged with its free neighbours. The device keeps showing it as used."""
        self.allocated_bytes -= block.size
        block.allocated = False
        block.merge()
        block.pool.insert(block)

    def _pool(self, small: bool, stream: int) -> Pool:
        pool = self.pools.get((small, stream))
        if pool is None:
            page_bytes = SMALL_SEGMENT_BYTES if small else self.settings.large_segment_bytes
            pool = Pool(small=small, page_bytes=page_bytes, begin=len(self.pools) * _RANGE_BYTES)
            self.pools[small, stream] = pool
        return pool

    def _cached(self, pool: Pool, size: int) -> Block | None:
        """The best-fitting free block, taken out of the pool."""
        free = pool.free
        index = bisect_left(free, (size,))
        if index == len(free):
            return None
        if self.settings.expandable_segments and free[index][2] is pool.last and index + 1 < len(free):
            index += 1  # what has room to grow is used last
        block = free[index][2]
        if size < self._max_split:
            if block.size >= self._max_split:
                return None  # kept whole for the large requests
        elif block.size >= size + self._max_rounding:
            return None
        del free[index]
        return block

    def _new(self, pool: Pool, size: int) -> Block:
        """A block from the driver."""
        last = pool.last if self.settings.expandable_segments else None
        grows = last is not None and not last.allocated
        if self.settings.expandable_segments:
            there = last.size if last is not None and grows else 0  # more than enough, if kept for large requests
            taken = rounded_up(max(0, size - there), pool.page_bytes)
        elif pool.small or size < _LARGE_ALONE_BYTES:
            taken = pool.page_bytes
        else:
            taken = rounded_up(size, _LARGE_MULTIPLE_BYTES)
        self.reserved_bytes += taken
        pool.end += taken
        if last is not None and grows:
            pool.remove(last)
            last.size += taken
            return last
        pool.last = Block(pool.end - taken, taken, pool, last)
        return pool.last
