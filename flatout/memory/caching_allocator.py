"""What a GPU would show as allocated and reserved, computed without one: torch's CUDA caching allocator, simulated.

Torch asks the driver for segments, cuts blocks out of them and keeps freed blocks for the next request. So a GPU shows
the reserved bytes, not the allocated ones, and runs out of memory when no free block and no new segment fits, however
many bytes are free in between. The rules, as in torch 2.13 (c10/cuda/CUDACachingAllocator.cpp):

- A request is rounded up to 512 bytes, or by `roundup_power2_divisions`. Up to 1 MiB it is small. Small and large
  blocks come from separate pools, and every stream has its own.
- The smallest free block that fits is taken, of equals the one at the lowest address. The rest is split off
  where it is at least 512 bytes (small) or more than 1 MiB (large, below `max_split_bytes`).
- Else a new segment: 2 MiB for small ones, 20 MiB for less than 10 MiB, else the request rounded up to 2 MiB. With
  expandable segments instead: one range of addresses per pool, in which pages of 2 MiB (small) or 20 MiB are mapped.
- A freed block is merged with its free neighbours. Only a segment that is free as a whole can be released to the driver
  (of an expandable one, every page); that happens when a request does not fit, which is then tried once more.

The tests replay runs of torch 2.13's own library above a stand-in for the CUDA runtime, recorded event by event, and
compare every figure. It cannot know what a device decides: which address a segment gets (here they ascend, which
matters only between blocks of equal size), and when a tensor used on other streams (`record_stream`) is free. The
CUDA context's own memory is not included: subtract it from the capacity.

>>> allocator = CachingAllocator(capacity_bytes=8 * 1024**3)
>>> weights = allocator.allocate(3_000_000)
>>> allocator.statistics().allocated_bytes, allocator.statistics().reserved_bytes
(3000320, 20971520)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from flatout.errors import FlatoutError, UsageError
from flatout.memory.allocator_settings import MIB, MIN_BLOCK_BYTES, AllocatorSettings
from flatout.memory.blocks import Block, BlockView, Pool
from flatout.units import format_bytes

SMALL_BYTES = MIB
"""The largest small request (torch's kSmallSize)."""

SMALL_SEGMENT_BYTES = 2 * MIB
_LARGE_ALONE_BYTES = 10 * MIB  # from here on a request gets a segment of its own (kMinLargeAlloc)
_LARGE_MULTIPLE_BYTES = 2 * MIB  # to which such a segment is rounded up (kRoundLarge)
_UNLIMITED_BYTES = 1 << 60  # torch refuses a request of this size before it looks for memory


class SimulatedOutOfMemory(FlatoutError):
    """The simulated device has no room for a request, even after all cached segments were released."""

    def __init__(
        self, *, requested_bytes: int, allocated_bytes: int, reserved_bytes: int, capacity_bytes: int | None
    ) -> None:
        self.requested_bytes = requested_bytes
        self.allocated_bytes = allocated_bytes
        self.reserved_bytes = reserved_bytes
        self.capacity_bytes = capacity_bytes
        room = "no device has that much" if capacity_bytes is None else f"the device has {format_bytes(capacity_bytes)}"
        super().__init__(
            f"no room for {format_bytes(requested_bytes)}",
            limit=f"{room}; {format_bytes(allocated_bytes)} are allocated and {format_bytes(reserved_bytes)} reserved",
        )


@dataclass(frozen=True, kw_only=True)
class AllocatorStatistics:
    """The figures of torch.cuda.memory_stats(), under torch's names; a peak is the highest since the last reset."""

    allocated_bytes: int  # in blocks that are in use, rounding included
    reserved_bytes: int  # in segments: what the device shows as used, but for the context
    requested_bytes: int  # as requested, before rounding
    inactive_split_bytes: int  # free, but stuck in a segment that is in use; expandable segments are not counted
    active: int  # blocks in use
    inactive_split: int
    segments: int  # from cudaMalloc; torch does not count expandable ones
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_requested_bytes: int
    peak_inactive_split_bytes: int
    peak_active: int
    peak_inactive_split: int
    peak_segments: int
    num_alloc_retries: int  # how often all cached segments were released to make room
    num_ooms: int
    num_device_alloc: int  # calls to the driver for memory, each of which may stall the device
    num_device_free: int

    @property
    def fragmentation(self) -> float:
        """The share of the reserved bytes that no tensor holds; 0 where nothing is reserved."""
        return 1 - self.allocated_bytes / self.reserved_bytes if self.reserved_bytes else 0.0


class CachingAllocator:
    """A device's memory as torch manages it. Sizes in bytes; streams are any numbers, 0 the default one.

    `capacity_bytes` is what the driver can give this process (None: no limit); `device_bytes` is all of the device's
    memory, of which `memory_fraction` is a fraction (None: the capacity).
    """

    def __init__(
        self,
        capacity_bytes: int | None = None,
        settings: AllocatorSettings | None = None,
        *,
        device_bytes: int | None = None,
    ) -> None:
        for name, value in (("capacity", capacity_bytes), ("device", device_bytes)):
            if value is not None and value < 0:
                raise UsageError(f"the {name} has {value} bytes", limit="it must be at least 0")
        self.settings = settings = settings if settings is not None else AllocatorSettings()
        self.capacity_bytes = capacity_bytes
        self._capacity = _UNLIMITED_BYTES if capacity_bytes is None else capacity_bytes
        self._device = self._capacity if device_bytes is None else device_bytes
        # Torch limits itself only where a fraction was set, and collects garbage only where it limits itself.
        limited = settings.memory_fraction < 1
        self._allowed = int(settings.memory_fraction * self._device) if limited else _UNLIMITED_BYTES
        self._collects = limited and settings.garbage_collection_threshold > 0
        self._expandable = settings.expandable_segments
        self._rounds_to_divisions = any(divisions > 1 for divisions in settings.roundup_power2_divisions)
        self._max_split = _UNLIMITED_BYTES if settings.max_split_bytes is None else settings.max_split_bytes
        rounding = settings.max_non_split_rounding_bytes
        self._max_rounding = settings.large_segment_bytes if rounding is None else rounding
        self._small_pools: dict[int, Pool] = {}
        self._large_pools: dict[int, Pool] = {}
        self._live: dict[int, Block | None] = {}
        self._next_handle = 1
        self._next_address = 0
        self._large_searches = 0
        self._allocated = self._reserved = self._requested = self._active = 0
        self._inactive = self._inactive_bytes = self._segments = 0
        self._retries = self._ooms = self._device_allocs = self._device_frees = 0
        self._peak_allocated = self._peak_reserved = self._peak_requested = self._peak_active = 0
        self._peak_inactive = self._peak_inactive_bytes = self._peak_segments = 0

    def allocate(self, size_bytes: int, stream: int = 0) -> int:
        """Take a block; returns the handle that frees it. Raises SimulatedOutOfMemory where torch would run out."""
        handle = self._next_handle
        if size_bytes <= 0:
            if size_bytes < 0:
                raise UsageError(f"a request of {size_bytes} bytes", limit="it must be at least 0")
            self._live[handle] = None  # an empty tensor has no memory at all
            self._next_handle += 1
            return handle
        if self._rounds_to_divisions:
            size = self.settings.rounded_bytes(size_bytes)
        else:
            size = (size_bytes + MIN_BLOCK_BYTES - 1) & -MIN_BLOCK_BYTES
        pool = self._pool(size <= SMALL_BYTES, stream)
        block = self._cached(pool, size)
        if block is None:
            block = self._new(pool, size, size_bytes)
        rest = block.size - size
        if rest >= MIN_BLOCK_BYTES and (
            pool.small or self._expandable or (rest > SMALL_BYTES and size < self._max_split)
        ):
            block = self._cut(block, size)
        elif block.is_split and not self._expandable:
            self._inactive -= 1
            self._inactive_bytes -= block.size
        block.allocated = True
        block.requested = size_bytes
        self._live[handle] = block
        self._next_handle += 1
        self._active += 1
        self._allocated += block.size
        self._requested += size_bytes
        if self._active > self._peak_active:
            self._peak_active = self._active
        if self._allocated > self._peak_allocated:
            self._peak_allocated = self._allocated
        if self._requested > self._peak_requested:
            self._peak_requested = self._requested
        return handle

    def free(self, handle: int) -> None:
        """Return a block to its pool, merged with its free neighbours. The device keeps showing it as used."""
        try:
            block = self._live.pop(handle)
        except KeyError:
            raise UsageError(f"allocation {handle} is not alive", limit="each can be freed once") from None
        if block is None:
            return
        self._active -= 1
        self._allocated -= block.size
        self._requested -= block.requested
        block.allocated = False
        gained, gained_bytes = 0, 0
        for neighbour in block.joinable():
            gained -= 1
            gained_bytes -= neighbour.size
            block.absorb(neighbour)
        self._insert_free(block)
        if self._expandable:
            return
        if block.is_split:
            gained += 1
            gained_bytes += block.size
        self._count_inactive(gained, gained_bytes)

    def empty_cache(self) -> None:
        """Release every segment that is free as a whole to the driver; of an expandable one, every free page."""
        for pools in (self._large_pools, self._small_pools):
            for pool in pools.values():
                for _, _, block in list(pool.free):
                    if self._expandable:
                        self._unmap(block)
                    elif not block.is_split:
                        self._release(block)

    def statistics(self) -> AllocatorStatistics:
        return AllocatorStatistics(
            allocated_bytes=self._allocated,
            reserved_bytes=self._reserved,
            requested_bytes=self._requested,
            inactive_split_bytes=self._inactive_bytes,
            active=self._active,
            inactive_split=self._inactive,
            segments=self._segments,
            peak_allocated_bytes=self._peak_allocated,
            peak_reserved_bytes=self._peak_reserved,
            peak_requested_bytes=self._peak_requested,
            peak_inactive_split_bytes=self._peak_inactive_bytes,
            peak_active=self._peak_active,
            peak_inactive_split=self._peak_inactive,
            peak_segments=self._peak_segments,
            num_alloc_retries=self._retries,
            num_ooms=self._ooms,
            num_device_alloc=self._device_allocs,
            num_device_free=self._device_frees,
        )

    @property
    def fragmentation(self) -> float:
        """The share of the reserved bytes that no tensor holds now."""
        return self.statistics().fragmentation

    def reset_peaks(self) -> None:
        """Start every peak again from the current value, as torch.cuda.reset_peak_memory_stats() does."""
        self._peak_allocated, self._peak_reserved = self._allocated, self._reserved
        self._peak_requested, self._peak_active = self._requested, self._active
        self._peak_inactive, self._peak_inactive_bytes = self._inactive, self._inactive_bytes
        self._peak_segments = self._segments

    def blocks(self) -> Iterator[BlockView]:
        """Every block, in no particular order."""
        for block in self._live.values():
            if block is not None:
                yield BlockView(block.address, block.size, block.pool.stream, "allocated")
        for pools in (self._small_pools, self._large_pools):
            for pool in pools.values():
                for size, address, _ in pool.free:
                    yield BlockView(address, size, pool.stream, "free")
                for address, block in pool.unmapped:
                    yield BlockView(address, block.size, pool.stream, "unmapped")

    def _pool(self, small: bool, stream: int) -> Pool:
        pools = self._small_pools if small else self._large_pools
        pool = pools.get(stream)
        if pool is None:
            page_bytes = SMALL_SEGMENT_BYTES if small else self.settings.large_segment_bytes
            pool = pools[stream] = Pool(small=small, stream=stream, page_bytes=page_bytes)
        return pool

    # Taking a block: from the cache, or from the driver

    def _cached(self, pool: Pool, size: int) -> Block | None:
        """The best-fitting free block, taken out of the pool."""
        if self._collects and not pool.small:
            self._large_searches += 1
        free = pool.free
        index = bisect_left(free, (size,))
        if index == len(free):
            return None
        if self._expandable:
            # A block before unmapped pages counts with them: the room to grow is used last.
            while index + 1 < len(free) and free[index + 1][2].grown_size < free[index][2].grown_size:
                index += 1
        block = free[index][2]
        if size < self._max_split:
            if block.size >= self._max_split:
                return None  # kept whole for the large requests
        elif block.size >= size + self._max_rounding:
            return None
        del free[index]
        return block

    def _new(self, pool: Pool, size: int, requested: int) -> Block:
        """A block from the driver, if necessary after releasing what is unused."""
        if requested >= _UNLIMITED_BYTES:
            raise self._out_of_memory(requested)
        if pool.small:
            segment_bytes = SMALL_SEGMENT_BYTES
        elif size < _LARGE_ALONE_BYTES:
            segment_bytes = self.settings.large_segment_bytes
        else:
            segment_bytes = -(-size // _LARGE_MULTIPLE_BYTES) * _LARGE_MULTIPLE_BYTES
        if self._collects:
            self._collect_garbage()
        block = self._from_driver(pool, size, segment_bytes)
        if block is None and self._release_oversize(pool, size):
            block = self._from_driver(pool, size, segment_bytes)
        if block is None:
            self.empty_cache()
            self._retries += 1
            block = self._from_driver(pool, size, segment_bytes)
        if block is None:
            self._ooms += 1
            raise self._out_of_memory(requested)
        return block

    def _out_of_memory(self, requested: int) -> SimulatedOutOfMemory:
        return SimulatedOutOfMemory(
            requested_bytes=requested,
            allocated_bytes=self._allocated,
            reserved_bytes=self._reserved,
            capacity_bytes=self.capacity_bytes,
        )

    def _from_driver(self, pool: Pool, size: int, segment_bytes: int) -> Block | None:
        if self._reserved + segment_bytes > self._allowed:
            return None  # the whole segment counts here, even where an expandable one would need less
        if self._expandable:
            return self._expand(pool, size)
        if self._reserved + segment_bytes > self._capacity:
            return None
        block = Block(self._next_address, segment_bytes, pool, self._next_address)
        self._next_address += segment_bytes
        self._segments += 1
        self._peak_segments = max(self._peak_segments, self._segments)
        self._reserve(segment_bytes)
        return block

    def _reserve(self, size: int) -> None:
        self._device_allocs += 1
        self._reserved += size
        self._peak_reserved = max(self._peak_reserved, self._reserved)

    # Blocks among their neighbours

    def _cut(self, block: Block, size: int) -> Block:
        """Split the front off a free block, whose rest returns to the pool."""
        if not self._expandable:
            if block.is_split:
                self._inactive_bytes -= size
            else:
                self._count_inactive(1, block.size - size)
        front = Block(block.address, size, block.pool, block.origin)
        front.insert_between(block.previous, block)
        block.address += size
        block.size -= size
        self._insert_free(block)
        return front

    def _insert_free(self, block: Block) -> None:
        block.born = self._large_searches
        block.pool.insert(block)

    def _count_inactive(self, blocks: int, size: int) -> None:
        self._inactive += blocks
        self._inactive_bytes += size
        if self._inactive > self._peak_inactive:
            self._peak_inactive = self._inactive
        if self._inactive_bytes > self._peak_inactive_bytes:
            self._peak_inactive_bytes = self._inactive_bytes

    # Releasing segments

    def _release(self, block: Block) -> None:
        assert not block.is_split, "only a whole segment can be released"
        block.pool.remove(block)
        self._reserved -= block.size
        self._segments -= 1
        self._device_frees += 1

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """Release as few unsplittable blocks as make room for the request; True if that may suffice."""
        if self.settings.max_split_bytes is None or self._expandable:
            return False
        wanted = max(size, self._max_split)
        index = bisect_left(pool.free, (wanted,))
        if index < len(pool.free):
            self._release(pool.free[index][2])
            return True
        released = 0
        while released < wanted and pool.free and pool.free[-1][0] >= self._max_split:
            released += pool.free[-1][0]
            self._release(pool.free[-1][2])
        return released >= wanted

    def _collect_garbage(self) -> None:
        """Release the large segments that have been free longest, above the threshold of the allowed memory."""
        excess = self._reserved - int(self.settings.garbage_collection_threshold * self._allowed)
        if excess <= 0 or self._expandable:
            return
        whole = [
            block for _, pool in sorted(self._large_pools.items()) for _, _, block in pool.free if not block.is_split
        ]
        while whole and excess > 0:
            ages = [self._large_searches - block.born for block in whole]
            mean = sum(ages) / len(ages)
            # All that are older than the mean are released, even beyond the excess, so that this does not happen often.
            for block, age in zip(whole, ages, strict=True):
                if age >= mean:
                    excess -= block.size
                    self._release(block)
            whole = [block for block, age in zip(whole, ages, strict=True) if age < mean]

    # Expandable segments: addresses are reserved once, memory is mapped to them page by page

    def _expand(self, pool: Pool, size: int) -> Block | None:
        block = self._room_to_grow(pool, size)
        if block is None or not (block.mapped or self._map(block, min(block.size, size))):
            return None
        while block.size < size:
            unmapped = block.following
            if unmapped is None or not self._map(unmapped, min(size - block.size, unmapped.size)):
                return None
            block = unmapped  # it has absorbed the free block before it
        pool.remove(block)
        return block

    def _room_to_grow(self, pool: Pool, size: int) -> Block | None:
        """The block at the lowest address from which free and unmapped blocks have room; else that of a new range."""
        for _, unmapped in pool.unmapped:
            before = unmapped.previous
            start = before if before is not None and not before.allocated else unmapped
            room, block = 0, start
            while room < size and not block.allocated:
                room += block.size
                if block.following is None:
                    break
                block = block.following
            if room >= size:
                return start
        span = -(-(self._device + self._device // 8) // pool.page_bytes) * pool.page_bytes
        if size > span:
            return None  # more than the device has
        block = Block(self._next_address, span, pool, self._next_address, mapped=False)
        self._next_address += span
        pool.insert(block)
        return block

    def _map(self, block: Block, size: int) -> bool:
        """Map pages to the front of an unmapped block and merge it with free neighbours; False if none are left."""
        pool = block.pool
        mapped_bytes = -(-size // pool.page_bytes) * pool.page_bytes
        if self._reserved + mapped_bytes > self._capacity:
            return False
        pool.remove(block)
        block.mapped = True
        if mapped_bytes < block.size:
            rest = Block(block.address + mapped_bytes, block.size - mapped_bytes, pool, block.origin, mapped=False)
            rest.insert_between(block, block.following)
            pool.insert(rest)
            block.size = mapped_bytes
        for neighbour in block.joinable():
            block.absorb(neighbour)
        self._insert_free(block)
        self._reserve(mapped_bytes)
        return True

    def _unmap(self, block: Block) -> None:
        """Unmap the pages that are wholly inside a free block; what is left at its ends stays free."""
        pool = block.pool
        page, offset = pool.page_bytes, block.address - block.origin
        begin = block.origin - (-offset // page) * page
        end = block.origin + (offset + block.size) // page * page
        if begin >= end:
            return
        pool.remove(block)
        if begin > block.address:
            before = Block(block.address, begin - block.address, pool, block.origin)
            before.insert_between(block.previous, block)
            self._insert_free(before)
        if block.address + block.size > end:
            after = Block(end, block.address + block.size - end, pool, block.origin)
            after.insert_between(block, block.following)
            self._insert_free(after)
        block.address, block.size, block.mapped = begin, end - begin, False
        self._reserved -= block.size
        self._device_frees += 1
        for neighbour in block.joinable():
            block.absorb(neighbour)
        if block.is_split:  # else the whole range is unmapped, and its addresses are released too
            pool.insert(block)
