"""Early stopping: training ends when a figure has not improved for some epochs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypedDict

from flatout.arguments import as_whole_number, wrong
from flatout.errors import UsageError

if TYPE_CHECKING:
    from flatout.checkpoint.folder import Checkpoints

Best = Literal["min", "max"]


@dataclass(frozen=True, kw_only=True)
class Patience:
    """End training after `epochs` epochs without an improvement of `fit`'s metric.

    `best`: whether the lowest or the highest figure is best; None: as in the checkpoints, and 'min' for a loss.
    `least_gain` is what an improvement has to exceed. NaN is no improvement.
    """

    epochs: int
    best: Best | None = None
    least_gain: float = 0.0

    def __post_init__(self) -> None:
        as_whole_number(self.epochs, "patience")
        if self.best not in ("min", "max", None):
            raise UsageError(f"best is {self.best!r}", limit="it is 'min' or 'max'")
        if (
            isinstance(self.least_gain, bool)
            or not isinstance(self.least_gain, int | float)
            or not self.least_gain >= 0
        ):
            raise wrong("least_gain", self.least_gain, "it is a number from 0")


class WaitingState(TypedDict):
    """The best figure so far, and the epochs since."""

    best: float | None
    epochs: int


class Waiting:
    """How long a figure has not improved."""

    def __init__(self, patience: Patience, best: Best) -> None:
        self._patience, self._sign = patience, 1.0 if best == "max" else -1.0
        self.best: float | None = None
        self.epochs = 0
        """Since the best one."""

    @property
    def over(self) -> bool:
        return self.epochs >= self._patience.epochs

    def note(self, value: float) -> None:
        gain = math.inf if self.best is None else self._sign * (value - self.best)
        if not math.isnan(value) and gain > self._patience.least_gain:
            self.best, self.epochs = value, 0
        else:
            self.epochs += 1

    def state_dict(self) -> WaitingState:
        return {"best": self.best, "epochs": self.epochs}

    def load_state_dict(self, state: WaitingState) -> None:
        self.best, self.epochs = state["best"], state["epochs"]


def as_patience(value: object) -> Patience | None:
    if value is None or isinstance(value, Patience):
        return value
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong("patience", value, "it is a number of epochs, or a flatout.Patience", "for example patience=5")
    return Patience(epochs=value)


def direction(
    metric: str, checkpoints: Checkpoints | None, patience: Patience | None, scheduler: object, *, needed: bool
) -> Best:
    """Whether the lowest or the highest figure of that name is best. UsageError if arguments contradict each other, or
    if it is needed and not given."""
    said: dict[str, Best] = {}
    if checkpoints is not None:
        said["Checkpoints(best=...)"] = "min" if checkpoints.lowest_is_best else "max"
    if patience is not None and patience.best is not None:
        said["Patience(best=...)"] = patience.best
    if hasattr(scheduler, "mode") and hasattr(scheduler, "num_bad_epochs"):
        said["ReduceLROnPlateau(mode=...)"] = scheduler.mode
    if len(set(said.values())) > 1:
        listed = ", ".join(f"{who} says {best!r}" for who, best in said.items())
        raise UsageError(
            f"for the metric {metric!r} {listed}", limit="one of them would keep the worst", remedy="make them agree"
        )
    if not said and needed and not metric.endswith("loss"):
        raise UsageError(
            f"metric is {metric!r}",
            limit="whether the highest or the lowest is best has to be given",
            remedy="pass Checkpoints(folder, best='max') or patience=Patience(epochs=5, best='max')",
        )
    return next(iter(said.values()), "min")
