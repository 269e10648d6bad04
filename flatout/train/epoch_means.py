"""The means of an epoch's losses and figures, each step weighted by the terms that its loss is the mean of.

They are summed on the host in the order of the steps, so that a resumed epoch has bitwise the same means.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from flatout.train.ranks import gathered, summed
from flatout.train.readings import Readings

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

Row = tuple[int, tuple[str, ...], tuple[str, ...]]
"""A step's number, the names of its values, and the names of those that are only logged."""


class EpochMeans:
    """`log(row, step)` is called with each step's own values, when they have been read."""

    def __init__(self, log: Callable[[dict[str, float], int], None]) -> None:
        self._log = log
        self._sums: dict[str, tuple[float, float]] = {}
        self._readings: Readings[Row] = Readings(self._take)

    def begin(self) -> None:
        """An epoch begins."""
        self._readings.read()
        self._sums = {}

    def add(
        self,
        step: int,
        loss: Tensor,
        figures: Mapping[str, Tensor | float],
        terms: Tensor | float,
        **beside: Tensor | float,
    ) -> None:
        """Values of a step; does not wait for them. `beside` is logged, but not averaged."""
        row = step, ("loss", *figures), tuple(beside)
        self._readings.add(row, [terms, loss, *figures.values(), *beside.values()])

    def _take(self, row: Row, values: list[float]) -> None:
        step, names, beside = row
        terms, *values = values
        logged = {f"batch_{name}": value for name, value in zip(names, values, strict=False)}
        logged |= dict(zip(beside, values[len(names) :], strict=True))
        for name, value in zip(names, values, strict=False):
            if terms:  # a mean over no terms adds nothing, even if it is NaN
                total, weight = self._sums.get(name, (0.0, 0.0))
                self._sums[name] = total + value * terms, weight + terms
        self._log(logged, step)

    def flush(self) -> None:
        """Log the values that were not read yet. Waits for the device."""
        self._readings.read()

    def means(self, group: ProcessGroup | None) -> dict[str, float]:
        """Over all ranks. Waits for the device."""
        return {name: total / weight for name, (total, weight) in self._all_sums(group).items()}

    def _all_sums(self, group: ProcessGroup | None) -> dict[str, tuple[float, float]]:
        self._readings.read()
        return summed(gathered(self._sums, group))

    def state_dict(self, group: ProcessGroup | None) -> dict[str, list[float]]:
        """The sums so far, over all ranks."""
        return {name: list(pair) for name, pair in self._all_sums(group).items()}

    def load_state_dict(self, state: Mapping[str, Sequence[float]], *, first_rank: bool) -> None:
        """The saved sums are those of all ranks: only one rank continues with them."""
        self._sums = {name: (total, weight) for name, (total, weight) in state.items()} if first_rank else {}
