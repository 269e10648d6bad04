"""The cost of starting an epoch: starting workers, sending them the data set, and waiting for the first batch.

Medians of steps do not show it, because it affects one step per epoch.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

MOST_KEPT = 512


class EpochStarts:
    """Called by a run: `iterator_made` when the training loader makes one, `step_ended` at the boundary after it."""

    def __init__(self) -> None:
        self.workers = 0
        """Processes of the training loader that are restarted in every epoch."""
        self._began: float | None = None
        self._previous: tuple[float, int] | None = None
        self._costs: list[float] = []
        self._lengths: list[float] = []
        self._steps: list[int] = []
        self._typical_seconds = 0.0
        self.begun = 0
        """Iterators of training loaders in which a step was seen; the first one is made before its loader is known."""
        self.began_at: tuple[float, int] | None = None
        """Clock, and steps in the run until then, of the latest of them."""
        self.steps_in_last: int | None = None
        """Steps of the one before."""

    def iterator_made(self, loader: DataLoader[object], began: float, steps: int = 0) -> None:
        """began: clock before the loader was asked for it, in seconds; steps: in the run until then."""
        self.workers = 0 if loader.persistent_workers else loader.num_workers
        if self._previous is not None:
            self._lengths = [*self._lengths, began - self._previous[0]][-MOST_KEPT:]
            self._steps = [*self._steps, steps - self._previous[1]][-MOST_KEPT:]
        self._previous, self._began = (began, steps), began

    def step_ended(self, now: float, typical_seconds: float | None) -> None:
        if self._began is None:
            return
        self._epoch_begun()
        if typical_seconds is not None:
            self._typical_seconds = typical_seconds
            self._costs = [*self._costs, max(0.0, now - self._began - typical_seconds)][-MOST_KEPT:]
        self._began = None

    def _epoch_begun(self) -> None:
        """An iterator in which nothing was trained (an evaluation on the training set) is no epoch."""
        assert self._previous is not None
        began_at = self._previous
        self.steps_in_last = began_at[1] - (self.began_at[1] if self.began_at is not None else 0)
        self.begun, self.began_at = self.begun + 1, began_at

    @property
    def cost_seconds(self) -> float | None:
        """Median, from asking for the iterator to the end of its first step, less a step's usual time.

        At most the part of the epoch not spent in steps: other work before the first step does not count.
        """
        if not self._costs or self.epoch_seconds is None:
            return statistics.median(self._costs) if self._costs else None
        left = self.epoch_seconds - statistics.median(self._steps) * self._typical_seconds
        return max(0.0, min(statistics.median(self._costs), left))

    @property
    def epoch_seconds(self) -> float | None:
        """Median, from one iterator to the next; None before the second."""
        return statistics.median(self._lengths) if self._lengths else None
