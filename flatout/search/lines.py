"""Trials as lines of text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from flatout.search.trial import C, NotTried, Record, Trial
from flatout.statistics import Comparison
from flatout.units import format_bytes, format_seconds

BudgetOption = Callable[[float], str]
"""How a budget of this many seconds is given: '--budget 2m'."""

WIDE = 0.3
"""Half the width of an interval, as a share of the ratio: wider ones are far from symmetric."""


def seconds_argument(seconds: float) -> str:
    """How `flatout.tune` and `tune_inference` take a budget."""
    return f"seconds={10 * math.ceil(seconds / 10)}"


def trial_lines(trials: Sequence[Trial]) -> list[str]:
    """One line per trial, in columns."""
    width = max((len(trial.label) for trial in trials), default=0)
    return [_trial(trial, width) for trial in trials]


def _trial(trial: Trial, width: int) -> str:
    head = f"{trial.outcome:<8}{trial.label:<{width}}  "
    times = peaks = ""
    if trial.baseline_seconds is not None and trial.candidate_seconds is not None:
        times = f"{format_seconds(trial.baseline_seconds)} -> {format_seconds(trial.candidate_seconds)}"
    if trial.baseline_peak_bytes is not None and trial.candidate_peak_bytes is not None:
        peaks = f"peak {format_bytes(trial.baseline_peak_bytes)} -> {format_bytes(trial.candidate_peak_bytes)}"
    if trial.comparison is None or not times:
        return head + "  ".join(filter(None, [peaks, times, trial.reason]))
    tail = f"{times:<21} {ratio_text(trial.comparison)}"
    if trial.predicted is not None:
        least, _, most = trial.predicted.ratios
        earlier = f", {trial.predicted.earlier}" if trial.predicted.earlier else ""
        tail += f" (predicted {least:.2f} to {most:.2f}{earlier})"
    if peaks:
        tail += f"  {peaks}"
    if trial.accuracy is not None:
        tail += f"  {trial.accuracy}"
    elif trial.outcome == "kept":
        tail += f"  {trial.exactness}"
    if trial.outcome == "kept":
        return f"{head}{tail}" + ("" if trial.reason == "faster" else f"; {trial.reason}")
    return f"{head}{tail}  {trial.reason}"


def ratio_text(comparison: Comparison) -> str:
    """'x1.47 ±0.02': half the width of the confidence interval; its ends, where it is wide; without one, the pairs."""
    if not comparison.has_interval:
        return f"x{comparison.ratio:.2f} ({comparison.pairs} pairs)"
    half = (comparison.high - comparison.low) / 2
    if half > WIDE * comparison.ratio:
        return f"x{comparison.ratio:.2f} ({comparison.low:.2f} to {comparison.high:.2f})"
    return f"x{comparison.ratio:.2f} ±{half:.2f}"


def not_tried_lines(skipped: Sequence[NotTried]) -> list[str]:
    """One line per reason, so that the GPU levers do not fill the screen on a CPU."""
    by_reason: dict[str, list[str]] = {}
    for entry in skipped:
        by_reason.setdefault(entry.reason, []).append(entry.label)
    return [f"{', '.join(labels)}: {reason}" for reason, labels in by_reason.items()]


def nothing_found(state: Record[C], budget_seconds: float, option: BudgetOption) -> str:
    """The result of a search that kept nothing; what was not tried may still help."""
    left = _left(state)
    if not left and any(one.comparison is not None and one.comparison.verdict == "faster" for one in state.trials):
        return "nothing is kept: what was faster did not hold, or does not pay off"
    if not left:
        return "nothing helps here"
    until = f"in the budget of {format_seconds(budget_seconds)}"
    if state.stopped_after_seconds is not None:
        until = f"until the search was stopped after {format_seconds(state.stopped_after_seconds)}"
    return f"nothing found {until}, with {left}{_enough(state, option)}"


def reach_lines(state: Record[C], option: BudgetOption) -> list[str]:
    """One line, where something was kept and other levers were not reached, or dropped while the machine was busy."""
    left = _left(state)
    return [f"{left}{_enough(state, option) or _stopped(state)}"] if left and state.kept else []


def _left(state: Record[C]) -> str:
    """'3 not reached and 1 dropped while the machine was busy'; '' where all that applies was tried."""
    counts = {"not reached": state.late, "dropped while the machine was busy": state.dropped_while_busy}
    return " and ".join(f"{count} {how}" for how, count in counts.items() if count)


def _enough(state: Record[C], option: BudgetOption) -> str:
    if state.enough_seconds is None:
        return ""
    budget = f"try {option(state.enough_seconds)} (about)"
    if state.short_run_steps is None:
        return f": {budget}"
    return (
        f": let it run for more than {state.short_run_steps} steps (starting it takes longer than these), or {budget}"
    )


def _stopped(state: Record[C]) -> str:
    seconds = state.stopped_after_seconds
    return "" if seconds is None else f": the search was stopped after {format_seconds(seconds)}"
