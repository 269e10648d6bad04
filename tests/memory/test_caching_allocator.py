"""The rules of c10/cuda/CUDACachingAllocator.cpp, each by hand, and runs of the real one, recorded.

Every test of a rule names the function of the source that it follows.
"""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.memory.allocator_settings import MIB, AllocatorSettings
from flatout.memory.caching_allocator import Block, CachingAllocator

RECORDED = json.loads((Path(__file__).parents[1] / "recorded" / "caching_allocator.json").read_text())


def allocator(text: str = "") -> CachingAllocator:
    return CachingAllocator(AllocatorSettings.from_text(text))


def allocated_and_reserved(size: int, text: str = "") -> tuple[int, int]:
    device = allocator(text)
    device.allocate(size)
    return device.allocated_bytes, device.reserved_bytes


def places(*blocks: Block) -> list[tuple[float, float]]:
    """(address, size) in MiB."""
    return [(block.address / MIB, block.size / MIB) for block in blocks]


def free_blocks(device: CachingAllocator) -> list[Block]:
    """By address."""
    free = [block for pool in device.pools.values() for *_, block in pool.free]
    return sorted(free, key=lambda block: block.address)


def test_round_size_to_512_bytes() -> None:
    assert [allocated_and_reserved(size)[0] for size in (1, 512, 513, 1024)] == [512, 512, 1024, 1024]


def test_round_size_by_divisions_of_a_power_of_two() -> None:
    assert allocated_and_reserved(5000, "roundup_power2_divisions:4")[0] == 5120


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB - 511, 10 * MIB),  # rounded first: 10 MiB are no longer less than 10 MiB
        (10 * MIB + 1, 12 * MIB),
        (123 * MIB, 124 * MIB),
    ],
)
def test_get_allocation_size(size: int, segment: int) -> None:
    assert allocated_and_reserved(size)[1] == segment


def test_get_allocation_size_with_another_large_segment() -> None:
    assert allocated_and_reserved(2 * MIB, "large_segment_size_mb:32")[1] == 32 * MIB


@pytest.mark.parametrize(("size", "taken"), [(19 * MIB, 20 * MIB), (19 * MIB - 512, 19 * MIB - 512)])
def test_should_split_large_only_above_1_mib(size: int, taken: int) -> None:
    assert allocated_and_reserved(size) == (taken, 20 * MIB)


def test_should_split_small_from_512_bytes() -> None:
    device = allocator()
    device.allocate(MIB)
    device.allocate(MIB - 512)
    assert places(*free_blocks(device)) == [(2 - 512 / MIB, 512 / MIB)]
    device.allocate(1)
    assert free_blocks(device) == []
    assert device.reserved_bytes == 2 * MIB


def test_get_free_block_takes_the_smallest_that_fits_and_of_equals_the_lowest() -> None:
    device = allocator()
    for block in reversed([device.allocate(size * MIB) for size in (30, 12, 14, 12)]):
        device.free(block)
    assert places(device.allocate(11 * MIB)) == [(30, 12)]
    assert places(device.allocate(13 * MIB)) == [(42, 14)]
    assert device.reserved_bytes == 68 * MIB


def test_get_free_block_keeps_blocks_of_max_split_size_for_large_requests() -> None:
    device = allocator("max_split_size_mb:40")
    device.free(device.allocate(40 * MIB))
    device.allocate(39 * MIB)  # below max_split_size: it may not take the 40 MiB
    assert device.reserved_bytes == 80 * MIB
    device.allocate(40 * MIB)
    assert device.reserved_bytes == 80 * MIB


def test_get_free_block_rounds_up_unsplittable_blocks_within_a_limit() -> None:
    """Of 64 MiB, 44 MiB + 1 may be taken (less than 20 MiB lie idle, max_non_split_rounding_mb), 44 MiB may not."""
    device = allocator("max_split_size_mb:40")
    device.free(device.allocate(64 * MIB))
    device.allocate(44 * MIB)
    assert device.reserved_bytes == 108 * MIB
    device.allocate(44 * MIB + 1)
    assert device.reserved_bytes == 108 * MIB
    assert device.allocated_bytes == 108 * MIB  # and it is not split


def test_should_split_never_for_a_request_of_max_split_size() -> None:
    device = allocator("max_split_size_mb:40")
    device.free(device.allocate(44 * MIB))
    assert places(device.allocate(40 * MIB)) == [(0, 44)]


def test_try_merge_blocks_joins_both_neighbours() -> None:
    device = allocator()
    first, second, third = (device.allocate(4 * MIB) for _ in range(3))
    device.free(first)
    device.free(third)
    assert places(*free_blocks(device)) == [(0, 4), (8, 12)]
    device.free(second)
    assert places(*free_blocks(device)) == [(0, 20)]


def test_every_stream_has_its_own_pools() -> None:
    """BlockComparatorSize orders by stream first: a block is never handed to another stream."""
    device = allocator()
    device.free(device.allocate(30 * MIB, stream=1))
    device.allocate(30 * MIB, stream=2)
    assert device.reserved_bytes == 60 * MIB
    device.allocate(30 * MIB, stream=1)
    assert device.reserved_bytes == 60 * MIB


def test_map_block_maps_pages_of_2_and_20_mib() -> None:
    device = allocator("expandable_segments:True")
    device.allocate(1)
    assert device.reserved_bytes == 2 * MIB
    device.allocate(41 * MIB)
    assert device.reserved_bytes == 62 * MIB
    device.allocate(19 * MIB)  # the rest of the third page
    assert device.reserved_bytes == 62 * MIB


def test_try_allocate_expandable_block_grows_from_the_free_end() -> None:
    device = allocator("expandable_segments:True")
    blocks = device.allocate(15 * MIB), device.allocate(50 * MIB)  # 5 MiB are mapped already
    assert places(*blocks) == [(0, 15), (15, 50)]
    assert device.reserved_bytes == 80 * MIB


def test_try_allocate_expandable_block_takes_the_free_end_that_is_kept_for_large_requests() -> None:
    """get_free_block refuses it; before pages that are not mapped it is taken all the same, and nothing is mapped."""
    device = allocator("expandable_segments:True,max_split_size_mb:40")
    device.free(device.allocate(300 * MIB))
    assert places(device.allocate(39 * MIB)) == [(0, 39)]
    assert places(*free_blocks(device)) == [(39, 261)]
    assert device.reserved_bytes == 300 * MIB


def test_get_free_block_spends_the_room_to_grow_last() -> None:
    device = allocator("expandable_segments:True")
    first, _ = device.allocate(18 * MIB), device.allocate(20 * MIB)
    device.free(first)
    assert places(*free_blocks(device)) == [(0, 18), (38, 2)]
    device.allocate(2 * MIB)  # 2 MiB would fit exactly, but stand before the unmapped pages
    assert places(*free_blocks(device)) == [(2, 16), (38, 2)]


def test_get_free_block_takes_the_lower_of_equals_in_expandable_segments() -> None:
    device = allocator("expandable_segments:True")
    blocks = [device.allocate(6 * MIB) for _ in range(4)]
    device.free(blocks[2])
    device.free(blocks[0])
    device.allocate(6 * MIB)
    assert places(*free_blocks(device))[0] == (12, 6)


@pytest.mark.parametrize("run", RECORDED["runs"], ids=lambda run: run["settings"] or "defaults")
def test_runs_are_as_torch_recorded_them(run: dict[str, Any]) -> None:
    """After each event, the figures of torch's own library, driven above a stand-in for the CUDA runtime; until that
    gives anything back to the driver, or finds it without memory."""
    device, live, replayed = allocator(run["settings"]), dict[str, Block](), 0
    for number, (event, expected) in enumerate(run["steps"]):
        figures = dict(zip(RECORDED["fields"], expected, strict=True))
        if figures["num_device_free"] or figures["num_alloc_retries"] or figures["num_ooms"]:
            break
        match event.split():
            case "allocate", name, size, stream if int(size):
                live[name] = device.allocate(int(size), int(stream))
            case "free", name if name in live:
                device.free(live.pop(name))
        found = device.allocated_bytes, device.reserved_bytes
        assert found == (figures["allocated_bytes"], figures["reserved_bytes"]), f"after event {number}: {event}"
        replayed += 1
    assert replayed >= 8


def check_consistency(device: CachingAllocator, live: list[Block]) -> None:
    blocks = sorted([*live, *free_blocks(device)], key=lambda block: block.address)
    for below, above in itertools.pairwise(blocks):
        assert below.address + below.size <= above.address
    assert sum(block.size for block in live) == device.allocated_bytes
    assert sum(block.size for block in blocks) == device.reserved_bytes


SETTINGS = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:24",
    "roundup_power2_divisions:4,expandable_segments:True,max_split_size_mb:30",
)
SIZES = st.one_of(st.integers(1, 2 * MIB), st.integers(1, 64 * MIB), st.sampled_from([MIB, 10 * MIB, 20 * MIB]))


@settings(max_examples=60, deadline=None)
@given(
    text=st.sampled_from(SETTINGS),
    events=st.lists(st.tuples(st.booleans(), SIZES, st.integers(0, 1)), max_size=60),
)
def test_memory_is_never_lost_or_doubled(text: str, events: list[tuple[bool, int, int]]) -> None:
    device, live = allocator(text), list[Block]()
    for frees, size, stream in events:
        before = device.reserved_bytes
        if frees and live:
            device.free(live.pop(size % len(live)))
        else:
            live.append(device.allocate(size, stream))
            assert live[-1].size >= size
        assert device.reserved_bytes >= before  # nothing is given back
        check_consistency(device, live)
    while live:
        device.free(live.pop())
    check_consistency(device, live)
    free = free_blocks(device)
    assert all(block.previous is None and block.following is None for block in free)  # whole segments again


@pytest.mark.parametrize("text", SETTINGS)
@pytest.mark.first_case
def test_two_hundred_thousand_events(text: str) -> None:
    draw = random.Random(0)
    device = allocator(text)
    live: list[Block] = []
    for _ in range(100_000):
        live.append(device.allocate(int(2 ** draw.uniform(4, 27))))
        if len(live) > 500:
            index = draw.randrange(len(live))
            live[index], live[-1] = live[-1], live[index]
            device.free(live.pop())
    check_consistency(device, live)
    assert len(live) == 500
