"""Samples a second and memory against the batch size, and where the curve's knee is: arithmetic on measured values.

Below the knee a larger batch uses the machine better: what a step costs whatever its size is spread over more samples.
Above it a larger batch takes only more memory. The knee is the smallest size whose speed is within a stated share of
the best measured. Whether it is, is decided by intervals, never by figures alone: sizes are measured in turns, and each
is compared with every other round by round, as which one is the best is not known for certain either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

from flatout.notebook_tables import ShownAsText
from flatout.sequential import compare_so_far
from flatout.statistics import Comparison, compare_paired, median
from flatout.units import format_bytes, format_number, format_seconds, labelled

SHARE = 0.95
LEAST_ROUNDS = 3
"""Fewer give no interval."""
BAR_WIDTH = 20
EIGHTHS = " ▏▎▍▌▋▊▉"
CAVEAT = "advice only, nothing is changed: a different batch size trains differently, so retune learning rate and steps"

Standing = Literal["within", "below", "unclear"]


@dataclass(frozen=True, kw_only=True)
class FailedSize:
    """A size whose step failed, and why; it is left out of the curve."""

    batch_size: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class BatchPoint:
    """One batch size that ran."""

    batch_size: int
    samples_per_step: int
    """The batch size; for a script that accumulates gradients, that of all the batches of a step."""
    window_seconds: tuple[float, ...]
    """Seconds per step, one for each round: the i-th of all points were taken one after the other."""
    peak_bytes: int | None
    """The most that the tensors of a step hold; None: unknown."""
    forecast_bytes: int | None = None
    """The peak as it was forecast before the size was run; None: not forecast, as a larger one had fitted."""
    of_best: Comparison | None = None
    """Its speed as a share of that of the fastest point, paired round by round; None: nothing to compare."""
    standing: Standing = "unclear"
    """Is it shown to be within the share of the best, whichever that is, or shown to be below it?"""

    @property
    def step_seconds(self) -> float:
        """The median of the rounds."""
        return median(self.window_seconds)

    @property
    def samples_per_second(self) -> float:
        return self.samples_per_step / self.step_seconds

    @property
    def samples_per_second_interval(self) -> tuple[float, float] | None:
        """Of 95 %; None where the rounds are too few."""
        found = compare_paired([float(self.samples_per_step)] * len(self.window_seconds), self.window_seconds)
        if not found.has_interval:
            return None
        return min(found.low, self.samples_per_second), max(found.high, self.samples_per_second)

    def to_json(self) -> dict[str, object]:
        return {
            **asdict(self),
            "step_seconds": self.step_seconds,
            "samples_per_second": self.samples_per_second,
            "samples_per_second_interval": self.samples_per_second_interval,
            "of_best": None if self.of_best is None else self.of_best.to_json(),
        }


@dataclass(frozen=True, kw_only=True, repr=False)
class BatchCurve(ShownAsText):
    """Speed and memory by batch size, with the evidence; `str()` of it is one screen.

    With another batch size a model trains differently: this is advice, and never applied.
    """

    subject: str
    """Whose steps were measured: the model's class, or the script."""
    device: str
    given_batch_size: int
    points: tuple[BatchPoint, ...]
    """By batch size, the smallest first."""
    knee: BatchPoint | None
    """The smallest batch size whose speed is within `share` of the best measured; None: unknown, see `knee_reason`."""
    knee_reason: str
    share: float
    peak_source: str
    """How `peak_bytes` came about: 'measured: ...' or 'forecast: ...'."""
    limit_bytes: int | None
    """The most that tensors may hold; None: no limit was known."""
    stopped_below: str
    """Why no smaller size was measured."""
    stopped_above: str
    """Why no larger size was measured."""
    failed: tuple[FailedSize, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float

    @property
    def best(self) -> BatchPoint:
        """The fastest measured."""
        return fastest(self.points)

    @property
    def rounds(self) -> int:
        return len(self.points[0].window_seconds)

    def to_json(self) -> dict[str, object]:
        return {
            **asdict(self),
            "knee": None if self.knee is None else self.knee.batch_size,
            "best": self.best.batch_size,
            "rounds": self.rounds,
            "points": [point.to_json() for point in self.points],
            "caveat": CAVEAT,
        }

    def __str__(self) -> str:
        counted = f"{self.rounds} round{'s' * (self.rounds != 1)} in turns"
        rows = [("speed", f"{self.subject} on {self.device} · batch {self.given_batch_size} given · {counted}")]
        rows += labelled("", _table(self))
        rows.append(("knee", f"{'unknown' if self.knee is None else self.knee.batch_size}: {self.knee_reason}"))
        rows.append(("ended", f"no smaller batch: {self.stopped_below}"))
        rows.append(("", f"no larger batch: {self.stopped_above}"))
        rows += labelled("failed", [f"batch {one.batch_size}: {one.reason}" for one in self.failed])
        rows.append(("peak", self.peak_source))
        rows += labelled("note", [*self.notes, CAVEAT])
        return "\n".join(f"{label:<10}{text}".rstrip() for label, text in rows)


def fastest(points: Sequence[BatchPoint]) -> BatchPoint:
    return max(points, key=lambda point: point.samples_per_second)


def judged(points: Sequence[BatchPoint], share: float) -> tuple[BatchPoint, ...]:
    """By batch size, each compared with the fastest, and with all the others for its standing."""
    best = fastest(points)
    ordered = sorted(points, key=lambda point: point.batch_size)
    return tuple(
        replace(point, of_best=_speed_over(best, point, share), standing=_standing(point, ordered, share))
        for point in ordered
    )


def _standing(point: BatchPoint, points: Sequence[BatchPoint], share: float) -> Standing:
    """Within the share of every other, and so of the best of them; or below it of one, and so of the best."""
    found = [_speed_over(other, point, share) for other in points if other is not point]
    if any(one.has_interval and one.high < share for one in found):
        return "below"
    return "within" if all(one.has_interval and one.low >= share for one in found) else "unclear"


def _speed_over(other: BatchPoint, point: BatchPoint, share: float) -> Comparison:
    """The speed of `point` as a share of the other's, with an interval that allows for looks after each few rounds."""
    pairs = [
        (theirs / other.samples_per_step, ours / point.samples_per_step)
        for theirs, ours in zip(other.window_seconds, point.window_seconds, strict=True)
    ]
    return compare_so_far(pairs, least_gain=share - 1)


def is_decided(points: Sequence[BatchPoint]) -> bool:
    """Is one size shown to be within the share, and every smaller one shown not to be? points: by batch size."""
    knee = _smallest_within(points)
    return knee is not None and not _unclear_below(points, knee)


def find_knee(points: Sequence[BatchPoint], share: float) -> tuple[BatchPoint | None, str]:
    """The knee and what it rests on; None and the reason, where the machine is too noisy to tell.

    points: `judged`. One size below the knee may be left undecided, and is named then.
    """
    best = fastest(points)
    rounds = len(best.window_seconds)
    if rounds < LEAST_ROUNDS:
        return None, f"{rounds} round{'s' * (rounds != 1)}, and at least {LEAST_ROUNDS} are needed"
    if len(points) == 1:
        return None, "only one size was measured, so there is no curve"
    knee = _smallest_within(points)
    unclear = _unclear_below(points, knee)
    if knee is None or len(unclear) > 1:
        which = f"the smallest batch within {share:.0%} of the best may be {_any_of(unclear, knee)}"
        return None, f"the rounds differ too much: {which}; measure again on an idle machine, or with a larger budget"
    return knee, _reason(points, knee, best, share) + "".join(f"; possibly {_share_text(point)}" for point in unclear)


def _any_of(unclear: Sequence[BatchPoint], knee: BatchPoint | None) -> str:
    sizes = [str(point.batch_size) for point in (*unclear, *([knee] if knee is not None else []))]
    return " or ".join([", ".join(sizes[:-1]), sizes[-1]] if len(sizes) > 1 else sizes)


def _smallest_within(points: Sequence[BatchPoint]) -> BatchPoint | None:
    return next((point for point in points if point.standing == "within"), None)


def _unclear_below(points: Sequence[BatchPoint], knee: BatchPoint | None) -> list[BatchPoint]:
    below = points if knee is None else [point for point in points if point.batch_size < knee.batch_size]
    return [point for point in below if point.standing == "unclear"]


def _reason(points: Sequence[BatchPoint], knee: BatchPoint, best: BatchPoint, share: float) -> str:
    rate = f"{format_number(best.samples_per_second)} samples/s"
    if knee is not best:
        return f"the smallest batch within {share:.0%} of the best ({rate} at {best.batch_size}): {_share_text(knee)}"
    if best is points[-1] and points[-2].standing == "below":
        return f"the fastest ({rate}) and the largest measured, where speed still rises: {_share_text(points[-2])}"
    return f"the fastest ({rate}), and no smaller batch is shown to reach {share:.0%} of that"


def _share_text(point: BatchPoint) -> str:
    found = point.of_best
    assert found is not None, "a point without its comparison"
    return f"{point.batch_size} at {found.ratio:.1%} ({found.low:.1%} to {found.high:.1%})"


# the table


def _table(curve: BatchCurve) -> list[str]:
    heads = ("batch", "samples/s", "95 % interval", "a step", "peak", "of the best")
    cells = [_cells(curve, point) for point in curve.points]
    widths = [max(len(row[column]) for row in (heads, *cells)) for column in range(5)]
    lines = []
    for row in (heads, *cells):
        figures = "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=False))
        lines.append(f"{figures}  {row[5]}")
    return lines


def _cells(curve: BatchCurve, point: BatchPoint) -> tuple[str, ...]:
    interval = point.samples_per_second_interval
    share = point.samples_per_second / curve.best.samples_per_second
    names = [
        name
        for name, one in (("knee", curve.knee), ("best", curve.best))
        if one is not None and one.batch_size == point.batch_size
    ]
    names += ["given"] * (point.batch_size == curve.given_batch_size)
    marks = f"  {', '.join(names)}" if names else ""
    return (
        str(point.batch_size),
        format_number(point.samples_per_second),
        f"{format_number(interval[0])}–{format_number(interval[1])}" if interval is not None else "unknown",
        format_seconds(point.step_seconds),
        format_bytes(point.peak_bytes) if point.peak_bytes is not None else "unknown",
        f"{_bar(share):<{BAR_WIDTH}} {share:>4.0%}{marks}",
    )


def _bar(share: float) -> str:
    eighths = round(8 * BAR_WIDTH * min(1.0, share))
    return ("█" * (eighths // 8) + EIGHTHS[eighths % 8]).rstrip()
