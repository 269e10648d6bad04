"""Forms batches: a window of the input, sorted by length, cut into batches of a bounded number of tokens.

The window bounds memory: no more samples are read ahead. Sorting brings similar lengths together, so that there is
little padding; the results of a window are returned in the order of its inputs.

>>> [len(batch) for batch in batches_of([3, 3, 1, 4], lambda n: n, max_tokens=8, padded=True)]
[2, 2]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

WINDOW_BATCHES = 16
"""Batches' worth of tokens that a window holds. More would sort better and hold more results in memory: at 16 the
padding of log-normal lengths is below 3 %."""
WINDOW_ITEMS = 4096
BATCH_SIZE = 32
"""Inputs of fixed size, such as images, in one batch; of small ones as many as hold `batch_tokens` numbers together."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """How much is read ahead, and how much goes into one batch."""

    batch_tokens: int
    batch_size: int | None
    """Inputs of fixed size in one batch, as asked for; None: see BATCH_SIZE."""
    window_tokens: int
    window_items: int = WINDOW_ITEMS

    def size_of_batch(self, numbers: int) -> int:
        """Inputs of fixed size in one batch at most; `numbers`: in one input."""
        return self.batch_size or max(BATCH_SIZE, self.batch_tokens // max(numbers, 1))


def windows(samples: Iterator[T], tokens: Callable[[T], int], bounds: Bounds) -> Iterator[list[T]]:
    """Runs of samples, each full as the bounds say: at least one sample, and at most one that exceeds the tokens.

    Where `samples` raises, those before come first: what was read is not lost.
    """
    window: list[T] = []
    held = 0
    failure: Exception | None = None
    try:
        for sample in samples:
            window.append(sample)
            held += tokens(sample)
            if held >= bounds.window_tokens or len(window) >= bounds.window_items:
                yield window
                window, held = [], 0
    except Exception as error:
        failure = error
    if window:
        yield window
    if failure is not None:
        raise failure


def batches_of(
    samples: Sequence[T], length: Callable[[T], int], *, max_tokens: int, max_size: int | None = None, padded: bool
) -> list[list[T]]:
    """Batches of at most `max_tokens` and `max_size`, sorted by length, the longest first; any sample gets into one.

    padded: a sample counts as many tokens as the longest of its batch. The longest come first, so that memory that
    does not suffice shows at once.
    """
    found: list[list[T]] = []
    held = 0
    for sample in sorted(samples, key=length, reverse=True):
        own = length(sample)
        batch = found[-1] if found else []
        total = (len(batch) + 1) * length(batch[0]) if padded and batch else held + own
        if not batch or total > max_tokens or (max_size is not None and len(batch) >= max_size):
            found.append([sample])
            held = own
        else:
            batch.append(sample)
            held += own
    return found


def bucket_length(length: int) -> int:
    """The next of 8, 12, 16, 24, 32, 48, 64, 96, ...: few lengths, so few shapes to compile, at most a third padding.

    >>> bucket_length(25), bucket_length(33), bucket_length(512)
    (32, 48, 512)
    """
    size = 8
    while size < length:
        if size + size // 2 >= length:
            return size + size // 2
        size *= 2
    return size
