"""PYTORCH_CUDA_ALLOC_CONF as torch 2.13 reads it (c10/core/AllocatorConfig.cpp)."""

import pytest

from flatout.errors import UsageError
from flatout.memory.allocator_settings import MIB, AllocatorSettings


def test_an_empty_text_gives_torchs_defaults() -> None:
    settings = AllocatorSettings.from_text("")
    assert settings == AllocatorSettings()
    assert (settings.large_segment_bytes, settings.max_split_bytes) == (20 * MIB, None)


def test_every_key_that_moves_memory_is_read() -> None:
    settings = AllocatorSettings.from_text(
        "expandable_segments : True, large_segment_size_mb:32,max_split_size_mb:128,max_non_split_rounding_mb:64,"
        "garbage_collection_threshold:0.8,per_process_memory_fraction:0.9,roundup_power2_divisions:4,"
    )
    assert settings == AllocatorSettings(
        expandable_segments=True,
        large_segment_bytes=32 * MIB,
        max_split_bytes=128 * MIB,
        max_non_split_rounding_bytes=64 * MIB,
        roundup_power2_divisions=(4,) * 16,
    )


def test_the_large_segment_is_read_before_what_it_limits() -> None:
    """AcceleratorAllocatorConfig::parseArgs looks for large_segment_size_mb first, wherever it stands."""
    assert AllocatorSettings.from_text("max_split_size_mb:15,large_segment_size_mb:12").max_split_bytes == 15 * MIB


def test_keys_without_effect_on_device_memory_are_accepted() -> None:
    text = "pinned_use_background_threads:True,release_lock_on_cudamalloc:True,backend:native"
    assert AllocatorSettings.from_text(f"{text},throw_on_cudamalloc_oom:False") == AllocatorSettings()


@pytest.mark.parametrize(
    ("text", "divisions"),
    [  # each as torch 2.13.0 gave it
        ("[256:1,512:2,1024:4,>:8]", (1,) * 9 + (2, 4) + (8,) * 5),
        ("[64:8,1024:4]", (8,) * 7 + (0,) * 3 + (4,) + (0,) * 5),
        ("[>:4]", (0,) + (4,) * 15),
        ("[512:2,4:8,>:1]", (2, 2, 8) + (1,) * 13),
        ("[65536:4,>:2]", (4,) * 16),
        ("[]", (0,) * 16),
    ],
)
def test_divisions_per_interval(text: str, divisions: tuple[int, ...]) -> None:
    assert AllocatorSettings.from_text(f"roundup_power2_divisions:{text}").roundup_power2_divisions == divisions


@pytest.mark.parametrize(
    ("divisions", "size", "rounded"),
    [
        (0, 1, 512),
        (0, 512, 512),
        (0, 513, 1024),
        (4, 1200, 1536),  # not above 512 * 4: to 512 bytes
        (4, 2048, 2048),
        (4, 2049, 2560),  # 2048, 2560, 3072, 3584, 4096
        (4, 4096, 4096),  # a power of two stays
        (4, 1200 * MIB, 1280 * MIB),  # the example in the source: 1024, 1280, 1536, 1792
        (1, 1200 * MIB, 1200 * MIB),
    ],
)
def test_round_size_and_roundup_power2_next_division(divisions: int, size: int, rounded: int) -> None:
    assert AllocatorSettings(roundup_power2_divisions=(divisions,) * 16).rounded_bytes(size) == rounded


def test_the_interval_is_that_of_the_size() -> None:
    """roundup_power2_divisions(size) goes by the power of two below: the first up to 2 MiB, the last from 32 GiB."""
    settings = AllocatorSettings.from_text("roundup_power2_divisions:[1:2,2:4,>:8]")
    assert settings.rounded_bytes(2 * MIB - 1) == 2 * MIB
    assert settings.rounded_bytes(2 * MIB + 1) == 2.5 * MIB
    assert settings.rounded_bytes(4 * MIB + 1) == 4.5 * MIB
    assert settings.rounded_bytes(64 * 1024 * MIB + 1) == 72 * 1024 * MIB


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max_split_size_mb:19", "max_split_size_mb is 19; it must be at least 20"),
        ("large_segment_size_mb:30,max_non_split_rounding_mb:25", "is 25; it must be at least 30"),
        ("large_segment_size_mb:10", "is 10; it must be above 10"),
        ("max_split_size_mb:1.5", "is 1.5; it must be a whole number"),
        ("expandable_segments:true", "is true; it must be spelled True or False"),
        ("garbage_collection_threshold:0", "is 0; it must be between 0 and 1"),
        ("garbage_collection_threshold:1", "it must be between 0 and 1"),
        ("garbage_collection_threshold:much", "is much; it must be a number"),
        ("per_process_memory_fraction:1.5", "is 1.5; it must be between 0 and 1"),
        ("roundup_power2_divisions:3", "is 3; a number of divisions is a power of two or 0"),
        ("roundup_power2_divisions:0", "a number of divisions for all sizes is a power of two"),
        ("roundup_power2_divisions:[3:4]", "is 3; an interval begins at a power of two MiB"),
        ("roundup_power2_divisions:[4]", "is 4; an item is written MiB:divisions"),
        ("backend:cudaMallocAsync", "only torch's native allocator is simulated; use backend:native"),
        ("throw_on_cudamalloc_oom:True", "only torch's usual retries are simulated; leave it out"),
        ("max_split:128", "'max_split' is not a setting of the allocator; its settings are expandable_segments"),
        ("max_split_size_mb=128", "cannot read 'max_split_size_mb=128'"),
        ("expandable_segments:True,max_split_size_mb", "cannot read 'max_split_size_mb'"),
    ],
)
def test_what_torch_refuses_is_refused_with_the_value_and_the_limit(text: str, says: str) -> None:
    with pytest.raises(UsageError) as refusal:
        AllocatorSettings.from_text(text)
    assert says in str(refusal.value)
