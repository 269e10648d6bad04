"""The settings of torch's CUDA caching allocator, as PYTORCH_CUDA_ALLOC_CONF writes them, without needing a GPU.

Only what moves device memory is kept. Keys that concern pinned host memory, locks, graph capture, or a device that is
full are accepted and have no effect here. Two are refused: `backend:cudaMallocAsync` is another allocator altogether,
and `throw_on_cudamalloc_oom:True` fails by the driver's count of free memory, before anything cached is released.

>>> AllocatorSettings.from_text("expandable_segments:True,max_split_size_mb:128").max_split_bytes
134217728
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flatout.errors import UsageError

MIB = 1024**2
MIN_BLOCK_BYTES = 512
"""Every block is a multiple of this (torch's kMinBlockSize)."""

_INTERVALS = 16  # a number of divisions per power of two: up to 2 MiB, up to 4 MiB, ..., from 32 GiB on
_FIRST_INTERVAL = 20  # the first begins at 2**20 bytes, and smaller sizes count as its own

_PAIR = re.compile(r"([^,:\[\]]+):(\[[^\[\]]*\]|[^,:\[\]]+)(?:,|$)")
_WITHOUT_EFFECT = ("graph_capture_record_stream_reuse", "release_lock_on_cudamalloc", "release_lock_on_hipmalloc")
_KEYS = (
    "expandable_segments, garbage_collection_threshold, large_segment_size_mb, max_non_split_rounding_mb, "
    "max_split_size_mb, per_process_memory_fraction, roundup_power2_divisions"
)


@dataclass(frozen=True, kw_only=True)
class AllocatorSettings:
    """How the caching allocator rounds and splits memory. The defaults are torch's."""

    expandable_segments: bool = False
    large_segment_bytes: int = 20 * MIB  # what a request from 1 to 10 MiB reserves, and the page of a large segment
    max_split_bytes: int | None = None  # larger blocks are never split; None: all may be
    max_non_split_rounding_bytes: int | None = None  # how much too large an unsplittable block may be; None: as above
    roundup_power2_divisions: tuple[int, ...] = (0,) * _INTERVALS  # 0 or 1: round to 512 bytes only

    def __post_init__(self) -> None:
        _at_least("large_segment_size_mb", self.large_segment_bytes, 11 * MIB, "above 10")
        for name, value in (
            ("max_split_size_mb", self.max_split_bytes),
            ("max_non_split_rounding_mb", self.max_non_split_rounding_bytes),
        ):
            if value is not None:
                _at_least(name, value, self.large_segment_bytes, f"at least {self.large_segment_bytes // MIB}")
        for divisions in self.roundup_power2_divisions:
            if divisions < 0 or divisions & (divisions - 1):
                raise _unusable("roundup_power2_divisions", divisions, "a number of divisions is a power of two or 0")

    @classmethod
    def from_text(cls, text: str) -> AllocatorSettings:
        """Parse what PYTORCH_CUDA_ALLOC_CONF holds: `key:value,key:value`; an empty text gives the defaults."""
        settings: dict[str, Any] = {}  # Any: values of the fields of different types
        for key, value in _pairs(text):
            match key:
                case "expandable_segments":
                    settings["expandable_segments"] = _truth(key, value)
                case "large_segment_size_mb":
                    settings["large_segment_bytes"] = _whole(key, value) * MIB
                case "max_split_size_mb":
                    settings["max_split_bytes"] = _whole(key, value) * MIB
                case "max_non_split_rounding_mb":
                    settings["max_non_split_rounding_bytes"] = _whole(key, value) * MIB
                case "roundup_power2_divisions":
                    settings["roundup_power2_divisions"] = _divisions(value)
                case "garbage_collection_threshold" | "per_process_memory_fraction":
                    _check_fraction(key, value)
                case "backend":
                    if value != "native":
                        raise _unusable(key, value, "only torch's native allocator is simulated", "use backend:native")
                case "throw_on_cudamalloc_oom":
                    if _truth(key, value):
                        raise _unusable(key, value, "only torch's usual retries are simulated", "leave it out")
                case _ if key not in _WITHOUT_EFFECT and not key.startswith("pinned_"):
                    raise UsageError(f"{key!r} is not a setting of the allocator", limit=f"its settings are {_KEYS}")
        return cls(**settings)

    def rounded_bytes(self, size_bytes: int) -> int:
        """The size of the block that a request takes: a multiple of 512, or the next division of a power of two."""
        if size_bytes < MIN_BLOCK_BYTES:
            return MIN_BLOCK_BYTES
        interval = min(max(size_bytes.bit_length() - 1 - _FIRST_INTERVAL, 0), _INTERVALS - 1)
        divisions = self.roundup_power2_divisions[interval]
        if divisions > 1 and size_bytes > MIN_BLOCK_BYTES * divisions:
            floor = 1 << (size_bytes.bit_length() - 1)
            return rounded_up(size_bytes, floor // divisions)
        return rounded_up(size_bytes, MIN_BLOCK_BYTES)


def rounded_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    compact = "".join(text.split())
    position = 0
    while position < len(compact):
        match = _PAIR.match(compact, position)
        if match is None:
            raise UsageError(
                f"cannot read {compact[position:]!r} in the allocator's settings",
                limit="they are written key:value,key:value",
                remedy="such as expandable_segments:True,max_split_size_mb:128",
            )
        yield match[1], match[2]
        position = match.end()


def _divisions(value: str) -> tuple[int, ...]:
    """`8`: the same for all sizes. `[256:1,512:2,>:4]`: by the size in MiB, a power of two, where an interval begins.

    Sizes below the first interval count as its own; those between two that are not neighbours are not rounded.
    """
    key = "roundup_power2_divisions"
    if not value.startswith("["):
        if not _whole(key, value):
            raise _unusable(key, value, "a number of divisions for all sizes is a power of two")
        return (_whole(key, value),) * _INTERVALS
    divisions, last = [0] * _INTERVALS, None
    for item in filter(None, value[1:-1].split(",")):
        begin, colon, count = item.partition(":")
        if not colon:
            raise _unusable(key, item, "an item is written MiB:divisions", "such as [256:2,>:4]")
        if begin == ">":
            first = 1 if last is None else last + 1
            divisions[first:] = [_whole(key, count)] * (_INTERVALS - first)
            continue
        size_mib = _whole(key, begin)
        if size_mib < 1 or size_mib & (size_mib - 1):
            raise _unusable(key, begin, "an interval begins at a power of two MiB")
        index = min(size_mib.bit_length() - 1, _INTERVALS - 1)
        if last is None:
            divisions[:index] = [_whole(key, count)] * index
        divisions[index] = _whole(key, count)
        last = index
    return tuple(divisions)


def _unusable(key: str, value: object, limit: str, remedy: str = "") -> UsageError:
    return UsageError(f"{key} is {value}", limit=limit, remedy=remedy)


def _at_least(key: str, value_bytes: int, least_bytes: int, limit: str) -> None:
    if value_bytes < least_bytes:
        raise _unusable(key, f"{value_bytes / MIB:g}", f"it must be {limit}")


def _whole(key: str, value: str) -> int:
    if not (value.isascii() and value.isdigit()):
        raise _unusable(key, value, "it must be a whole number")
    return int(value)


def _check_fraction(key: str, value: str) -> None:
    """Neither matters where the device is never full: garbage is collected near the fraction of it that is allowed."""
    try:
        number = float(value)
    except ValueError:
        raise _unusable(key, value, "it must be a number") from None
    if not (0 <= number <= 1 if key == "per_process_memory_fraction" else 0 < number < 1):
        raise _unusable(key, value, "it must be between 0 and 1")


def _truth(key: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise _unusable(key, value, "it must be spelled True or False")
    return value == "True"
