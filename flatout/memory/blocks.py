"""Device memory: blocks, which know their neighbours, and pools, which know the free ones."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Literal, NamedTuple


class BlockView(NamedTuple):
    """One block as it is in memory. A block that is not mapped is an address without memory behind it."""

    address: int
    size_bytes: int
    stream: int
    state: Literal["allocated", "free", "unmapped"]


class Pool:
    """The free blocks of one kind on one stream, and the unmapped ends of its expandable segments."""

    __slots__ = ("free", "page_bytes", "small", "stream", "unmapped")

    def __init__(self, *, small: bool, stream: int, page_bytes: int) -> None:
        self.small, self.stream, self.page_bytes = small, stream, page_bytes
        self.free: list[tuple[int, int, Block]] = []  # ascending (size, address): the order of the best fit
        self.unmapped: list[tuple[int, Block]] = []  # ascending address: pages are mapped from the lowest on

    def insert(self, block: Block) -> None:
        if block.mapped:
            insort(self.free, (block.size, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))

    def remove(self, block: Block) -> None:
        if block.mapped:
            del self.free[bisect_left(self.free, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]


class Block:
    """A part of the segment that begins at `origin`, linked to its neighbours in the same segment. Sizes in bytes."""

    __slots__ = (
        "address",
        "allocated",
        "born",
        "following",
        "mapped",
        "origin",
        "pool",
        "previous",
        "requested",
        "size",
    )

    def __init__(self, address: int, size: int, pool: Pool, origin: int, *, mapped: bool = True) -> None:
        self.address, self.size, self.pool, self.origin, self.mapped = address, size, pool, origin, mapped
        self.allocated = False
        self.requested = 0
        self.born = 0  # how many searches of large pools there had been when it became free
        self.previous: Block | None = None
        self.following: Block | None = None

    @property
    def is_split(self) -> bool:
        return self.previous is not None or self.following is not None

    @property
    def grown_size(self) -> int:
        """How large it could become by mapping the pages behind it, in bytes."""
        following = self.following
        return self.size + (following.size if following is not None and not following.mapped else 0)

    def insert_between(self, previous: Block | None, following: Block | None) -> None:
        self.previous, self.following = previous, following
        if previous is not None:
            previous.following = self
        if following is not None:
            following.previous = self

    def joinable(self) -> list[Block]:
        """The free neighbours that are mapped, or not, as it is."""
        return [
            neighbour
            for neighbour in (self.previous, self.following)
            if neighbour is not None and not neighbour.allocated and neighbour.mapped == self.mapped
        ]

    def absorb(self, neighbour: Block) -> None:
        """Merge a neighbour into this block, which is in no list of the pool."""
        self.pool.remove(neighbour)
        self.size += neighbour.size
        if neighbour is self.previous:
            self.address = neighbour.address
            self.previous = neighbour.previous
            if self.previous is not None:
                self.previous.following = self
        else:
            self.following = neighbour.following
            if self.following is not None:
                self.following.previous = self
