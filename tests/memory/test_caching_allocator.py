"""The rules of c10/cuda/CUDACachingAllocator.cpp, each by hand, and whole runs of the real one, recorded.

Every test of a rule names the function of the source that it follows.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.errors import UsageError
from flatout.memory.allocator_settings import MIB, AllocatorSettings
from flatout.memory.caching_allocator import AllocatorStatistics, CachingAllocator, SimulatedOutOfMemory

GIB = 1024 * MIB
RECORDED = json.loads((Path(__file__).parents[1] / "recorded" / "caching_allocator.json").read_text())


def allocator(text: str = "", capacity_bytes: int | None = None, **device: int) -> CachingAllocator:
    return CachingAllocator(capacity_bytes, AllocatorSettings.from_text(text), **device)


def allocated_and_reserved(size: int, text: str = "") -> tuple[int, int]:
    device = allocator(text)
    device.allocate(size)
    return device.statistics().allocated_bytes, device.statistics().reserved_bytes


def layout(device: CachingAllocator, state: str) -> list[tuple[float, float]]:
    """(address, size) of the blocks in that state, in MiB, by address."""
    return sorted((block.address / MIB, block.size_bytes / MIB) for block in device.blocks() if block.state == state)


def test_round_size_to_512_bytes() -> None:
    assert [allocated_and_reserved(size)[0] for size in (1, 512, 513, 1024)] == [512, 512, 1024, 1024]


def test_round_size_by_divisions_of_a_power_of_two() -> None:
    assert allocated_and_reserved(5000, "roundup_power2_divisions:4")[0] == 5120


def test_an_empty_tensor_takes_nothing() -> None:
    """NativeCachingAllocator::allocate asks for nothing where the size is 0."""
    device = allocator(capacity_bytes=0)
    device.free(device.allocate(0))
    assert device.statistics() == allocator().statistics()


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
    assert layout(device, "free") == [(2 - 512 / MIB, 512 / MIB)]
    device.allocate(1)
    assert layout(device, "free") == []
    assert device.statistics().reserved_bytes == 2 * MIB


def test_get_free_block_takes_the_smallest_that_fits_and_of_equals_the_lowest() -> None:
    device = allocator()
    blocks = [device.allocate(size * MIB) for size in (30, 12, 14, 12)]
    for handle in reversed(blocks):
        device.free(handle)
    device.allocate(11 * MIB)  # the 12 MiB from address 30 on
    assert layout(device, "allocated") == [(30, 12)]
    device.allocate(13 * MIB)
    assert layout(device, "allocated") == [(30, 12), (42, 14)]
    assert device.statistics().reserved_bytes == 68 * MIB


def test_get_free_block_keeps_blocks_of_max_split_size_for_large_requests() -> None:
    device = allocator("max_split_size_mb:40")
    device.free(device.allocate(40 * MIB))
    device.allocate(39 * MIB)  # below max_split_size: it may not take the 40 MiB
    assert device.statistics().reserved_bytes == 80 * MIB
    device.allocate(40 * MIB)
    assert device.statistics().reserved_bytes == 80 * MIB


def test_get_free_block_rounds_up_unsplittable_blocks_within_a_limit() -> None:
    """Of 64 MiB, 44 MiB + 1 may be taken (less than 20 MiB lie idle, max_non_split_rounding_mb), 44 MiB may not."""
    device = allocator("max_split_size_mb:40")
    device.free(device.allocate(64 * MIB))
    device.allocate(44 * MIB)
    assert device.statistics().reserved_bytes == 108 * MIB
    device.allocate(44 * MIB + 1)
    assert device.statistics().reserved_bytes == 108 * MIB
    assert device.statistics().allocated_bytes == 108 * MIB  # and it is not split


def test_should_split_never_for_a_request_of_max_split_size() -> None:
    device = allocator("max_split_size_mb:40")
    device.free(device.allocate(44 * MIB))
    device.allocate(40 * MIB)
    assert layout(device, "allocated") == [(0, 44)]


def test_try_merge_blocks_joins_both_neighbours() -> None:
    device = allocator()
    first, second, third = (device.allocate(4 * MIB) for _ in range(3))
    device.free(first)
    device.free(third)
    assert layout(device, "free") == [(0, 4), (8, 12)]
    device.free(second)
    assert layout(device, "free") == [(0, 20)]


def test_free_block_counts_what_is_stuck_as_inactive_split() -> None:
    device = allocator()
    first, second = device.allocate(4 * MIB), device.allocate(4 * MIB)
    assert (device.statistics().inactive_split_bytes, device.statistics().inactive_split) == (12 * MIB, 1)
    device.free(first)
    assert (device.statistics().inactive_split_bytes, device.statistics().inactive_split) == (16 * MIB, 2)
    device.free(second)
    assert (device.statistics().inactive_split_bytes, device.statistics().inactive_split) == (0, 0)
    assert (device.statistics().peak_inactive_split_bytes, device.statistics().peak_inactive_split) == (16 * MIB, 2)


def test_every_stream_has_its_own_pools() -> None:
    """BlockComparatorSize orders by stream first: a block is never handed to another stream."""
    device = allocator()
    device.free(device.allocate(30 * MIB, stream=1))
    device.allocate(30 * MIB, stream=2)
    assert device.statistics().reserved_bytes == 60 * MIB
    device.allocate(30 * MIB, stream=1)
    assert device.statistics().reserved_bytes == 60 * MIB


def test_malloc_gives_back_whole_segments_and_retries() -> None:
    device = allocator(capacity_bytes=50 * MIB)
    device.free(device.allocate(30 * MIB, stream=1))
    device.allocate(40 * MIB)
    figures = device.statistics()
    assert (figures.reserved_bytes, figures.num_alloc_retries, figures.num_ooms) == (40 * MIB, 1, 0)
    assert (figures.num_device_alloc, figures.num_device_free, figures.segments) == (2, 1, 1)


def test_malloc_runs_out_though_enough_is_free_in_pieces() -> None:
    device = allocator(capacity_bytes=40 * MIB)
    blocks = [device.allocate(5 * MIB) for _ in range(8)]
    for handle in blocks[::2]:
        device.free(handle)
    with pytest.raises(SimulatedOutOfMemory) as refusal:
        device.allocate(6 * MIB)
    error = refusal.value
    assert (error.requested_bytes, error.capacity_bytes) == (6 * MIB, 40 * MIB)
    assert (error.allocated_bytes, error.reserved_bytes) == (20 * MIB, 40 * MIB)
    assert str(error) == "no room for 6 MiB; the device has 40 MiB; 20 MiB are allocated and 40 MiB reserved"
    assert (device.statistics().num_ooms, device.statistics().num_alloc_retries) == (1, 1)
    assert device.fragmentation == device.statistics().fragmentation == 0.5
    device.allocate(5 * MIB)  # it goes on


def test_malloc_refuses_an_exabyte_without_looking() -> None:
    device = allocator()
    with pytest.raises(SimulatedOutOfMemory, match="no device has that much"):
        device.allocate(1 << 60)
    assert device.statistics().num_ooms == 0


def test_release_available_cached_blocks_gives_back_only_what_is_needed() -> None:
    device = allocator("max_split_size_mb:30", capacity_bytes=130 * MIB)
    for handle in [device.allocate(size * MIB) for size in (30, 40, 50)]:
        device.free(handle)
    device.allocate(90 * MIB)  # just the largest two, then it fits; the 30 MiB stay
    figures = device.statistics()
    assert (figures.reserved_bytes, figures.segments, figures.num_alloc_retries) == (120 * MIB, 2, 0)


def test_release_available_cached_blocks_prefers_one_that_suffices() -> None:
    device = allocator("max_split_size_mb:30", capacity_bytes=150 * MIB)
    for handle in [device.allocate(size * MIB) for size in (30, 40, 70)]:
        device.free(handle)
    device.allocate(34 * MIB)  # from the 40 MiB
    device.allocate(36 * MIB)  # the 70 MiB are too large to be taken, and the smallest to be given back
    assert (device.statistics().reserved_bytes, device.statistics().num_alloc_retries) == (106 * MIB, 0)


def test_set_memory_fraction_limits_the_process() -> None:
    device = allocator("per_process_memory_fraction:0.5", capacity_bytes=90 * MIB, device_bytes=100 * MIB)
    device.allocate(50 * MIB)
    with pytest.raises(SimulatedOutOfMemory):
        device.allocate(1)


COLLECTING = "garbage_collection_threshold:0.5,per_process_memory_fraction:0.99"  # above 99 of 200 MiB


def test_garbage_collect_cached_blocks_releases_what_waited_longest() -> None:
    device = allocator(COLLECTING, capacity_bytes=200 * MIB)
    idle, busy = device.allocate(40 * MIB), device.allocate(60 * MIB)
    device.free(idle)
    device.free(busy)
    device.free(device.allocate(60 * MIB))  # waits for one search less than the other
    device.allocate(70 * MIB)
    assert (device.statistics().reserved_bytes, device.statistics().num_alloc_retries) == (130 * MIB, 0)


def test_garbage_collect_cached_blocks_releases_all_of_one_age_and_small_searches_do_not_count() -> None:
    device = allocator(COLLECTING, capacity_bytes=200 * MIB)
    device.allocate(1)
    first, second = device.allocate(40 * MIB), device.allocate(60 * MIB)
    device.free(first)
    for _ in range(10):
        device.allocate(1)
    device.free(second)
    device.allocate(70 * MIB)
    assert (device.statistics().reserved_bytes, device.statistics().num_alloc_retries) == (72 * MIB, 0)


def test_garbage_collect_cached_blocks_goes_on_until_enough_is_released() -> None:
    device = allocator(COLLECTING, capacity_bytes=200 * MIB)
    first, second, third = (device.allocate(size * MIB) for size in (30, 60, 60))
    device.free(first)
    device.free(second)
    for _ in range(2):
        device.free(device.allocate(60 * MIB))
    device.free(third)
    device.free(device.allocate(60 * MIB))
    device.allocate(80 * MIB)  # 51 MiB too many; of ages 4, 2 and 1 goes the first, then of 2 and 1 the second
    assert (device.statistics().reserved_bytes, device.statistics().num_alloc_retries) == (140 * MIB, 0)


def test_garbage_is_not_collected_without_a_memory_fraction() -> None:
    """get_free_block and malloc look at the threshold only where allowed_memory_maximum has a value."""
    device = allocator("garbage_collection_threshold:0.1", capacity_bytes=200 * MIB)
    device.free(device.allocate(40 * MIB))
    device.allocate(70 * MIB)
    assert device.statistics().reserved_bytes == 110 * MIB


def test_map_block_maps_pages_of_2_and_20_mib() -> None:
    device = allocator("expandable_segments:True", capacity_bytes=GIB)
    device.allocate(1)
    assert device.statistics().reserved_bytes == 2 * MIB
    device.allocate(41 * MIB)
    assert device.statistics().reserved_bytes == 62 * MIB
    device.allocate(19 * MIB)  # the rest of the third page
    assert device.statistics().reserved_bytes == 62 * MIB
    assert (device.statistics().segments, device.statistics().inactive_split_bytes) == (0, 0)


def test_try_allocate_expandable_block_grows_from_the_free_end() -> None:
    device = allocator("expandable_segments:True", capacity_bytes=GIB)
    device.allocate(15 * MIB)
    device.allocate(50 * MIB)  # 5 MiB are mapped already
    assert layout(device, "allocated") == [(0, 15), (15, 50)]
    assert device.statistics().reserved_bytes == 80 * MIB
    assert layout(device, "unmapped") == [(80, 1160 - 80)]  # 1 1/8 of the device, in whole pages


def test_get_free_block_spends_the_room_to_grow_last() -> None:
    device = allocator("expandable_segments:True", capacity_bytes=GIB)
    first, _ = device.allocate(18 * MIB), device.allocate(20 * MIB)
    device.free(first)
    assert layout(device, "free") == [(0, 18), (38, 2)]
    device.allocate(2 * MIB)  # 2 MiB would fit exactly, but stand before the unmapped pages
    assert layout(device, "free") == [(2, 16), (38, 2)]


def test_get_free_block_takes_the_lower_of_equals_in_expandable_segments() -> None:
    device = allocator("expandable_segments:True", capacity_bytes=GIB)
    blocks = [device.allocate(6 * MIB) for _ in range(4)]
    device.free(blocks[2])
    device.free(blocks[0])
    device.allocate(6 * MIB)
    assert layout(device, "free")[0] == (12, 6)


def test_unmap_gives_back_only_whole_pages() -> None:
    device = allocator("expandable_segments:True", capacity_bytes=GIB)
    _, middle, _ = device.allocate(5 * MIB), device.allocate(50 * MIB), device.allocate(5 * MIB)
    device.free(middle)
    device.empty_cache()
    assert device.statistics().reserved_bytes == 40 * MIB
    assert layout(device, "free") == [(5, 15), (40, 15)]
    assert layout(device, "unmapped")[0] == (20, 20)


def test_find_expandable_block_fills_gaps_from_the_lowest_address() -> None:
    device = allocator("expandable_segments:True", capacity_bytes=GIB)
    _, middle, _ = device.allocate(5 * MIB), device.allocate(50 * MIB), device.allocate(5 * MIB)
    device.free(middle)
    device.empty_cache()
    device.allocate(45 * MIB)
    assert layout(device, "allocated") == [(0, 5), (5, 45), (55, 5)]
    assert device.statistics().reserved_bytes == 60 * MIB


def test_release_expandable_segment_forgets_its_addresses() -> None:
    device = allocator("expandable_segments:True", capacity_bytes=GIB)
    device.free(device.allocate(5 * MIB))
    device.empty_cache()
    assert list(device.blocks()) == []


def test_expandable_pages_stay_mapped_where_the_rest_found_no_room() -> None:
    device = allocator("expandable_segments:True", capacity_bytes=60 * MIB)
    _, middle, _ = device.allocate(10 * MIB), device.allocate(30 * MIB), device.allocate(20 * MIB)
    device.free(middle)
    with pytest.raises(SimulatedOutOfMemory):
        device.allocate(35 * MIB)
    assert device.statistics().num_alloc_retries == 1
    device.allocate(30 * MIB)
    assert device.statistics().reserved_bytes == 60 * MIB


def test_alloc_block_counts_the_whole_segment_against_the_fraction_even_where_pages_would_do() -> None:
    device = allocator("expandable_segments:True,per_process_memory_fraction:0.5", capacity_bytes=60 * MIB)
    device.allocate(15 * MIB)
    with pytest.raises(SimulatedOutOfMemory):
        device.allocate(9 * MIB)  # without expandable segments it would be one of 20 MiB
    device.allocate(5 * MIB)


def test_peaks_last_until_they_are_reset() -> None:
    device = allocator()
    device.free(device.allocate(30 * MIB))
    device.empty_cache()
    figures = device.statistics()
    assert (figures.allocated_bytes, figures.peak_allocated_bytes) == (0, 30 * MIB)
    assert (figures.reserved_bytes, figures.peak_reserved_bytes) == (0, 30 * MIB)
    assert (figures.peak_requested_bytes, figures.peak_active, figures.peak_segments) == (30 * MIB, 1, 1)
    device.reset_peaks()
    figures = device.statistics()
    assert (figures.peak_allocated_bytes, figures.peak_reserved_bytes, figures.peak_active) == (0, 0, 0)
    assert figures.fragmentation == device.fragmentation == 0


def test_misuse_says_what_is_wrong() -> None:
    device = allocator()
    handle = device.allocate(1)
    device.free(handle)
    with pytest.raises(UsageError, match=f"allocation {handle} is not alive; each can be freed once"):
        device.free(handle)
    with pytest.raises(UsageError, match="a request of -1 bytes"):
        device.allocate(-1)
    with pytest.raises(UsageError, match="the capacity has -1 bytes"):
        CachingAllocator(-1)


@pytest.mark.parametrize("run", RECORDED["runs"], ids=lambda run: run["settings"] or "defaults")
def test_whole_runs_are_as_torch_recorded_them(run: dict[str, Any]) -> None:
    """After each of 160 events, the figures of torch's own library, driven above a stand-in for the CUDA runtime."""
    device = allocator(run["settings"], run["capacity_bytes"], device_bytes=run["device_bytes"])
    handles: dict[str, int] = {}
    for number, (event, expected) in enumerate(run["steps"]):
        match event.split():
            case "allocate", name, size, stream:
                ooms = device.statistics().num_ooms
                try:
                    handles[name] = device.allocate(int(size), int(stream))
                except SimulatedOutOfMemory:
                    assert device.statistics().num_ooms == ooms + 1
            case "free", name if name in handles:
                device.free(handles.pop(name))
            case ["empty_cache"]:
                device.empty_cache()
        figures = device.statistics()
        assert [getattr(figures, field) for field in RECORDED["fields"]] == expected, f"after event {number}: {event}"
    assert [getattr(device.statistics(), field) for field in RECORDED["peak_fields"]] == run["peaks"]


def check_consistency(device: CachingAllocator) -> None:
    figures = device.statistics()
    blocks = sorted(device.blocks())
    for below, above in itertools.pairwise(blocks):
        assert below.address + below.size_bytes <= above.address
    mapped = {state: sum(b.size_bytes for b in blocks if b.state == state) for state in ("allocated", "free")}
    assert mapped["allocated"] == figures.allocated_bytes >= figures.requested_bytes
    assert mapped["allocated"] + mapped["free"] == figures.reserved_bytes
    assert device.capacity_bytes is None or figures.reserved_bytes <= device.capacity_bytes


def peaks(figures: AllocatorStatistics) -> Iterator[int]:
    for field in RECORDED["peak_fields"]:
        assert getattr(figures, field) >= getattr(figures, field.removeprefix("peak_"))
        yield getattr(figures, field)


SETTINGS = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:24",
    "garbage_collection_threshold:0.5,per_process_memory_fraction:0.8",
    "roundup_power2_divisions:4,expandable_segments:True,max_split_size_mb:30",
)
SIZES = st.one_of(st.integers(0, 2 * MIB), st.integers(0, 64 * MIB), st.sampled_from([MIB, 10 * MIB, 20 * MIB]))


@settings(max_examples=60, deadline=None)
@given(
    text=st.sampled_from(SETTINGS),
    capacity=st.one_of(st.none(), st.integers(0, 200 * MIB)),
    events=st.lists(st.tuples(st.integers(0, 9), SIZES, st.integers(0, 1)), max_size=60),
)
def test_memory_is_never_lost_doubled_or_kept(
    text: str, capacity: int | None, events: list[tuple[int, int, int]]
) -> None:
    device, live, highest = allocator(text, capacity), [], [0] * 7
    for choice, size, stream in events:
        if choice == 0:
            device.empty_cache()
        elif choice <= 4 and live:
            device.free(live.pop(size % len(live)))
        else:
            try:
                live.append(device.allocate(size, stream))
            except SimulatedOutOfMemory:
                assert device.statistics().num_ooms > 0
        check_consistency(device)
        now = list(peaks(device.statistics()))
        assert all(new >= old for new, old in zip(now, highest, strict=True))
        highest = now
    for handle in live:
        device.free(handle)
    assert device.statistics().allocated_bytes == device.statistics().requested_bytes == 0
    assert device.statistics().active == device.statistics().inactive_split_bytes == 0
    device.empty_cache()
    assert device.statistics().reserved_bytes == device.statistics().segments == 0
    assert {block.state for block in device.blocks()} <= {"unmapped"}  # addresses for a request that found no memory


@pytest.mark.parametrize("text", SETTINGS)
@pytest.mark.first_case
def test_two_hundred_thousand_events(text: str) -> None:
    draw = random.Random(0)
    device = allocator(text, 80 * GIB)
    live: list[int] = []
    for _ in range(100_000):
        live.append(device.allocate(int(2 ** draw.uniform(4, 27))))
        if len(live) > 500:
            index = draw.randrange(len(live))
            live[index], live[-1] = live[-1], live[index]
            device.free(live.pop())
    check_consistency(device)
    assert device.statistics().active == len(live) == 500
