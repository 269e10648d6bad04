"""Measure a curve: which batch sizes are run, in which order, for how long.

Sizes are added around the given one, alternately larger and smaller, until there is a reason to stop on each side; then
all of them are timed in rounds, in alternating order, until the knee is decided or the time is up. Nothing here knows
what a step is: that is behind `Sized`.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from flatout.errors import MachineError
from flatout.sequential import LOOKS
from flatout.sizing.curve import BatchCurve, BatchPoint, FailedSize, find_knee, is_decided, judged
from flatout.timing import Clock, LoadWatch, contention
from flatout.tuning.windows import Pace
from flatout.units import format_seconds

SHARE_OF_BUDGET_TO_PREPARE = 0.5
"""The rest is for the rounds."""
FEWEST_ROUNDS = LOOKS[2]
"""That the budget must hold for one size more to be added: six."""
FLAT_SIZES = 3
"""The larger side ends after this many sizes in a row that gain too little over the best before them."""
FAR_BELOW = 0.25
"""The smaller side ends below that share of the best."""
MOST_LOOKS, LOOKS_SECONDS = 5, 0.5
"""Short windows that estimate how long a step takes: the shortest, as disturbances only add to it."""
FAILURES_IN_A_ROW = 2
"""A side ends after them: one size may fail for its shape, two in a row show a limit."""


class TooLarge(Exception):
    """This size is not run: it takes more memory than there is, or more samples. The text says how much."""


class SizeFails(Exception):
    """The step raised at this size (`__cause__`); the text is one line."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A size whose first steps ran."""

    samples_per_step: int
    peak_bytes: int | None
    forecast_bytes: int | None = None


class Sized(Protocol):
    """Steps of one training that can be taken at any batch size; what else it says is the curve's."""

    subject: str
    device: str
    peak_source: str

    @property
    def limit_bytes(self) -> int | None: ...

    def prepare(self, batch_size: int) -> Prepared:
        """Ask whether it fits, and take its first steps. Raises TooLarge or SizeFails."""

    def window(self, batch_size: int, *, settle: int, steps: int) -> float:
        """Seconds of a step, the median of `steps`, after `settle` that are not counted.

        Raises TooLarge or SizeFails.
        """


@dataclass(frozen=True, kw_only=True)
class Range:
    """Which sizes may be run."""

    given: int
    at_least: int = 1
    at_most: int | None = None
    factor: float = 2.0
    least_reason: str = ""
    """Why `at_least` is what it is, where the user did not say it."""

    def larger(self) -> Iterator[int]:
        """The given size times the factor's powers."""
        yield from self._others(self.factor)

    def smaller(self) -> Iterator[int]:
        yield from self._others(1 / self.factor)

    def _others(self, factor: float) -> Iterator[int]:
        before = self.given
        for power in itertools.count(1):
            size = round(self.given * factor**power)
            if size < self.at_least or (self.at_most is not None and size > self.at_most):
                return
            if size != before:
                yield size
            before = size

    @property
    def below_least(self) -> str:
        """Why nothing smaller is run."""
        return self.least_reason or (f"at_least is {self.at_least}" if self.at_least > 1 else "1 is the smallest")


@dataclass
class _Size:
    """One that is timed."""

    batch_size: int
    prepared: Prepared
    pace: Pace
    step_seconds: float
    """A first estimate."""
    windows: list[float]

    @property
    def rate(self) -> float:
        return self.prepared.samples_per_step / self.step_seconds

    @property
    def round_seconds(self) -> float:
        return (self.pace.settle + self.pace.steps) * self.step_seconds


def measure_curve(
    sized: Sized,
    sizes: Range,
    *,
    share: float,
    budget_seconds: float,
    tell: Callable[[str], None],
    clock: Clock = time.perf_counter,
) -> BatchCurve:
    """Its `seconds` are those of the measuring alone. What the step raises at the given size is raised as it is.

    Raises MachineError where not even the smallest size fits.
    """
    measuring = _Measuring(sized, sizes, share, budget_seconds, tell, clock)
    measuring.add_sizes()
    watch = LoadWatch()
    measuring.take_rounds()
    competition = contention(watch.read())
    points = judged(measuring.points(), share)
    knee, reason = find_knee(points, share)
    return BatchCurve(
        subject=sized.subject,
        device=sized.device,
        given_batch_size=sizes.given,
        points=points,
        knee=knee,
        knee_reason=reason,
        share=share,
        peak_source=sized.peak_source,
        limit_bytes=sized.limit_bytes,
        failed=tuple(sorted(measuring.failed, key=lambda one: one.batch_size)),
        stopped_below=measuring.stopped["below"],
        stopped_above=measuring.stopped["above"],
        notes=(competition,) if competition else (),
        seconds=clock() - measuring.began,
    )


class _Measuring:
    def __init__(
        self, sized: Sized, sizes: Range, share: float, budget_seconds: float, tell: Callable[[str], None], clock: Clock
    ) -> None:
        self.sized, self.range, self.share, self.tell, self.clock = sized, sizes, share, tell, clock
        self.began, self.budget_seconds = clock(), budget_seconds
        self.sizes: list[_Size] = []
        self.failed: list[FailedSize] = []
        self.stopped = {"below": "", "above": ""}
        self._in_a_row = {"below": 0, "above": 0}

    def _none_runs(self, why: str) -> MachineError:
        return MachineError(
            f"no batch size from {self.range.at_least} to {self.range.given} could be run",
            limit=why,
            remedy="flatout.fit_to_memory(...) finds a plan that needs less",
        )

    # which sizes

    def add_sizes(self) -> None:
        """The given one, then alternately larger and smaller ones until each side has its reason to end."""
        self._add(self.range.given, "above")
        sides = {"above": self.range.larger(), "below": self.range.smaller()}
        while sides:
            for side in list(sides):
                if not self.stopped[side]:
                    self._next(side, sides[side])
                if self.stopped[side]:
                    del sides[side]
        if not self.sizes:
            raise self._none_runs(self.stopped["above"])

    def _next(self, side: str, candidates: Iterator[int]) -> None:
        batch_size = next(candidates, None)
        if batch_size is None:
            above = f"at_most is {self.range.at_most}"
            self.stopped[side] = above if side == "above" else self.range.below_least
        elif (reason := self._too_long(batch_size)) is not None:
            self.stopped[side] = reason
        else:
            self._add(batch_size, side)
            self.stopped[side] = self.stopped[side] or self._no_use(side)

    def _add(self, batch_size: int, side: str) -> None:
        self.tell(f"trying batch {batch_size}")
        failure = None
        try:
            self.sizes.append(self._prepared(batch_size))
            self._in_a_row[side] = 0
        except TooLarge as obstacle:
            self.stopped["above"] = str(obstacle)  # the side below continues, to the first that fits
        except SizeFails as caught:
            failure = caught
        if failure is not None:
            self._note(batch_size, failure)
            self._in_a_row[side] += 1
            if self._in_a_row[side] == FAILURES_IN_A_ROW:
                self.stopped[side] = f"the step failed at {FAILURES_IN_A_ROW} sizes in a row"

    def _note(self, batch_size: int, failure: SizeFails) -> None:
        """Call it outside the handler, so that the step's own error is shown without ours."""
        if batch_size == self.range.given:
            raise failure.__cause__ or failure
        self.failed.append(FailedSize(batch_size=batch_size, reason=str(failure)))

    def _prepared(self, batch_size: int) -> _Size:
        prepared = self.sized.prepare(batch_size)
        began, shortest = self.clock(), math.inf
        for looks in range(MOST_LOOKS):
            steps = 1 if looks == 0 else self._pace(shortest).steps
            shortest = min(shortest, self.sized.window(batch_size, settle=1, steps=steps))
            if self.clock() - began > LOOKS_SECONDS:
                break
        return _Size(batch_size, prepared, self._pace(shortest), shortest, [])

    def _pace(self, step_seconds: float) -> Pace:
        """Each size has one window in a round, as long as a pair of an interleaved comparison."""
        return Pace.for_step(step_seconds, seconds=self.budget_seconds).in_one_turn()

    def _too_long(self, batch_size: int) -> str | None:
        """Would this size, as slow as its neighbour by the sample, leave no time for enough rounds?"""
        spent = self.clock() - self.began
        if spent > SHARE_OF_BUDGET_TO_PREPARE * self.budget_seconds:
            budget = format_seconds(self.budget_seconds)
            return f"half of the budget of {budget} was spent on the first steps of the other sizes"
        if not self.sizes:
            return None
        near = min(self.sizes, key=lambda one: abs(math.log(one.batch_size / batch_size)))
        step = near.step_seconds * max(1.0, batch_size / near.batch_size)
        pace = self._pace(step)
        one_round = sum(one.round_seconds for one in self.sizes) + (pace.settle + pace.steps) * step
        if spent + FEWEST_ROUNDS * one_round <= self.budget_seconds:
            return None
        return (
            f"{FEWEST_ROUNDS} rounds with batch {batch_size}, about {format_seconds(step)} a step, do not fit into the "
            f"budget of {format_seconds(self.budget_seconds)}"
        )

    def _no_use(self, side: str) -> str:
        """Why a further size would show nothing new; '' where it may."""
        if not self.sizes:
            return ""
        best = max(one.rate for one in self.sizes)
        ordered = sorted(self.sizes, key=lambda one: one.batch_size)
        if side == "below":
            slowest = ordered[0]
            if slowest.rate >= FAR_BELOW * best:
                return ""
            return f"batch {slowest.batch_size} ran at less than {FAR_BELOW:.0%} of the best speed in its first steps"
        last, before = ordered[-FLAT_SIZES:], ordered[:-FLAT_SIZES]
        if not before or self.share * max(one.rate for one in last) > max(one.rate for one in before):
            return ""
        sizes = f"{last[0].batch_size} to {last[-1].batch_size}"
        return f"in their first steps batches of {sizes} gained less than {1 / self.share - 1:.0%} on a smaller one"

    # rounds

    def take_rounds(self) -> None:
        """Until the knee is decided, or the time is up."""
        most = LOOKS[-1]
        for number in range(1, most + 1):
            self.tell(f"round {number} of at most {most}, {len(self.sizes)} sizes")
            for one in self.sizes if number % 2 else self.sizes[::-1]:
                self._window(one)
            self._leave_out_the_failed(number)
            if not self.sizes:
                raise self._none_runs(self.failed[-1].reason)
            if self.clock() - self.began >= self.budget_seconds:
                return
            if number in LOOKS and is_decided(judged(self.points(), self.share)):
                return

    def _window(self, one: _Size) -> None:
        failure = None
        try:
            one.windows.append(self.sized.window(one.batch_size, settle=one.pace.settle, steps=one.pace.steps))
        except TooLarge as obstacle:  # it fitted before: others take the memory, or it is fragmented
            self.failed.append(FailedSize(batch_size=one.batch_size, reason=str(obstacle)))
        except SizeFails as caught:
            failure = caught
        if failure is not None:
            self._note(one.batch_size, failure)

    def _leave_out_the_failed(self, rounds: int) -> None:
        self.sizes = [one for one in self.sizes if len(one.windows) == rounds]

    def points(self) -> list[BatchPoint]:
        return [
            BatchPoint(
                batch_size=one.batch_size,
                samples_per_step=one.prepared.samples_per_step,
                window_seconds=tuple(one.windows),
                peak_bytes=one.prepared.peak_bytes,
                forecast_bytes=one.prepared.forecast_bytes,
            )
            for one in self.sizes
        ]
