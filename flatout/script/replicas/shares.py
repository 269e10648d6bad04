"""The order of a training DataLoader, of which each rank takes its share.

The script's own sampler runs on every rank, and gives the indices of a whole batch; a rank keeps a contiguous part of
them. Parts differ by at most one sample. Where a batch has fewer samples than there are ranks (the last one of an
epoch), a rank without one takes the first sample all the same, with weight 0: it has to make the step too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from flatout.data.order import share_of_rank

ORDER_BITS = (1 << 61) - 1


@dataclass(frozen=True)
class Share:
    """A rank's part of one batch."""

    samples: int
    whole: int
    """Samples of the batch on all ranks."""
    ranks: int

    @property
    def weight(self) -> float:
        """By how much a mean over this rank's samples counts in the mean over the ranks, which is then that over all
        samples: 1 where all ranks have as many."""
        return self.samples * self.ranks / self.whole if self.whole else 1.0

    @property
    def even(self) -> bool:
        """Do all ranks have as many samples?"""
        return self.whole % self.ranks == 0


class NotABatch(Exception):
    """What a sampler gave cannot be split: `what` it is."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


def share_of(indices: Any, rank: int, ranks: int) -> tuple[Any, Share]:  # a list, or what else holds indices
    """This rank's part of the indices, of their own type. Raises NotABatch for what has no parts."""
    if isinstance(indices, str | bytes) or not hasattr(indices, "__len__") or not hasattr(indices, "__getitem__"):
        raise NotABatch(f"a single index ({type(indices).__name__})")
    try:
        whole = len(indices)
    except TypeError:  # a tensor without dimensions
        raise NotABatch(f"a single index ({type(indices).__name__})") from None
    start, stop = share_of_rank(0, whole, rank, ranks)
    try:
        part = indices[start:stop] if stop > start else indices[:1]
    except (TypeError, KeyError):
        raise NotABatch(f"a {type(indices).__name__}, which cannot be sliced") from None
    return part, Share(stop - start, whole, ranks)


class SharedOrder:
    """In place of the iterator over a loader's batch sampler: the same batches, this rank's part of each.

    Holds no reference to the loader's iterator, which holds it.
    """

    def __init__(
        self,
        order: Iterator[object],
        draw: Callable[[Iterator[object]], object],
        split: Callable[[object], tuple[object, Share]],
    ) -> None:
        """draw: the next batch's indices; split: this rank's part of them."""
        self._order, self._draw, self._split = order, draw, split
        self._drawn: deque[Share] = deque()
        self.handed = 0
        """Batches that the script has got."""
        self.backwards_before: int | None = None
        """Backward passes of this process before the first of them."""
        self.ahead = False
        """Does the script draw batches before it has trained on those it has?"""
        self.python = True
        """May the dataset draw from Python's or numpy's generator?"""

    def __iter__(self) -> Iterator[object]:
        return self

    def __next__(self) -> object:
        indices, share = self._split(self._draw(self._order))
        self._drawn.append(share)
        return indices

    def hand_out(self) -> Share | None:
        """The share of the batch that the script gets now: workers draw some batches ahead, and hand them out in
        order."""
        self.handed += 1
        return self._drawn.popleft() if self._drawn else None


def digest_with(before: int, indices: Sequence[object]) -> int:
    """Of all indices so far and these; the same in every process (PYTHONHASHSEED is the same for all ranks)."""
    tolist = getattr(indices, "tolist", None)
    values = tolist() if tolist is not None else list(indices)
    try:
        return hash((before, *values)) & ORDER_BITS
    except TypeError:  # lists of lists
        return hash((before, repr(values))) & ORDER_BITS
