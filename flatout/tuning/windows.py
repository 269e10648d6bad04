"""Compare two ways of running one script in alternating windows.

An arm is a process and the levers that are on in it. Both arms may share one process (levers are switched between
windows) or have one each (the other waits at a step boundary). Windows take turns, A B, B A or B A, A B, so that
disturbances of the machine affect both arms alike; which of the two is drawn each time, so that a script's own rhythm
does so too (every eighth step logs, eight batches of different lengths come again and again).

A pair, as the sequential test counts it, is the median of several turns of short windows: see
`flatout.sequential.pair_of_turns`.

Scripts with so few steps that windows do not fit are compared by whole runs: each side of a pair is a run of its own,
in a new process, from the end of the script's first step, where `flatout run` turns levers on, to the end of its last.
The start-up cost of a lever is part of such a run, as it is for the user.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from statistics import fmean

from flatout.errors import TrialError
from flatout.levers.lever import Choice
from flatout.script.trial.answers import TrialEnded, Window
from flatout.sequential import LOOKS, compare_so_far, is_decided, pair_of_turns
from flatout.statistics import Comparison, compare_paired, median
from flatout.tuning.trials import Timed

LEAK_FLOOR_BYTES_PER_STEP, LEAK_FLOOR_BYTES_PER_SECOND = 32 << 10, 256 << 10
"""32 MiB in a thousand steps, and 0.9 GiB in an hour: in the few long steps of a comparison, caches that are still
growing look like a leak."""
LEAK_WINDOWS = 4
LEAST_GAIN = 0.01
"""Smaller gains are not kept."""
LOOKS_FASTER = 1.03
"""Speedup from which a comparison that is not decided yet is worth more time."""
PAIR_SECONDS, WINDOW_SECONDS = 0.15, 0.03
"""Of each arm in a pair, and in one of its windows."""
MOST_TURNS, MOST_WINDOW_STEPS, LEAST_WINDOW_STEPS = 6, 60, 4
"""A window has at least a few steps, as some after each switch are not counted."""
SETTLES_BELOW_SECONDS = (0.05, 1.0)
"""Where steps are shorter than each of these, one more step after a switch is not counted: what a switch leaves in
caches and allocators is rarely a share of a long step."""
FIRST_SLOWER = 1.15
"""Times the usual step: where a long step after a switch takes longer, it is that share, and is not counted either. An
allocator that keeps its memory faults it in again where copies in one process take turns: 0.8 s of a step of 1.4 s."""
WARMS_BELOW_SECONDS = (0.2, 0.2, 5.0)
"""The same for the first steps under a lever, which allocate, load kernels or compile."""
SWITCH_SHARE = 0.1
"""Share of a window: where switching levers takes longer, a pair is one turn of long windows."""
COMPILES_SECONDS, COMPILES_TIMES = 1.0, 20.0
"""A step under a compiler that takes longer than both, the second in usual steps, compiled ..."""
MOST_LATE_GRAPHS = 2
"""... at most so often: that of an evaluation and of a last batch. Longer steps that come back are the script's own."""
FIRST_STEPS = 3
"""Steps that pass before a trial takes commands."""
FEWEST_STEPS = 12
"""A script with fewer has no room even for the shortest windows of quick steps."""
WANTED_PAIRS = 8
"""Pairs of long whole runs: the smallest number with a rank-based interval, which a single disturbed run does not widen
without bound."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Lengths of windows. `settle` steps after a switch are run and not counted."""

    steps: int
    settle: int
    warm_steps: int
    turns: int = 1
    """Windows of each arm in one pair."""
    least_pairs: int = LOOKS[0]
    most_pairs: int = LOOKS[-1]
    seconds: float = 60.0
    """A comparison stops after this time, once it has `least_pairs`."""
    longest_seconds: float = 0.0
    """The same while the candidate looks faster; less than `seconds`: makes no difference."""
    least_gain: float = LEAST_GAIN
    counts_warm_up: bool = False
    """Does warm-up count towards `seconds`? Not in a search: a lever that compiles would have no time left."""
    stops_when_decided: bool = True
    """False: run all pairs that time allows, where the figure is wanted and not only a decision."""

    @classmethod
    def for_step(cls, step_seconds: float, *, seconds: float) -> Pace:
        """Windows of about 0.03 s, in turns until a pair has 0.15 s of each arm; of one step where steps take
        longer."""
        step = max(step_seconds, 1e-6)
        most = max(1, round(PAIR_SECONDS / step))
        steps = min(MOST_WINDOW_STEPS, max(round(WINDOW_SECONDS / step), min(LEAST_WINDOW_STEPS, most)))
        return cls(
            steps=steps,
            turns=max(1, min(MOST_TURNS, round(PAIR_SECONDS / (steps * step)))),
            settle=sum(step_seconds <= most for most in SETTLES_BELOW_SECONDS),
            warm_steps=1 + sum(step_seconds <= most for most in WARMS_BELOW_SECONDS),
            seconds=seconds,
        )

    @property
    def least_steps(self) -> int:
        """Steps of the fewest pairs that can decide, in one process."""
        return self.warm_steps + self.first_window + 2 * self.least_pairs * self.pair_steps

    @property
    def pair_steps(self) -> int:
        """Steps of each arm in one pair."""
        return self.turns * (self.settle + self.steps)

    def in_one_turn(self) -> Pace:
        """The same number of steps per pair, in one window per arm."""
        return replace(self, steps=self.steps * self.turns, turns=1)

    @property
    def first_window(self) -> int:
        """Steps that show the usual step time after a warm-up."""
        return max(2 if self.steps == 1 else 3, self.settle + 1)

    def fits(self, steps: int) -> bool:
        """Does a process with this many steps give a pair?"""
        return self.warm_steps + self.first_window + 2 * self.pair_steps <= steps

    def within(self, total_steps: int | None) -> Pace:
        """Windows short enough that a script of `total_steps` gives eight pairs per start, or at least two."""
        if total_steps is None:
            return self
        left = total_steps - FIRST_STEPS - self.warm_steps - self.first_window
        if self.turns > 1:
            return self if left >= 8 * self.pair_steps else self.in_one_turn().within(total_steps)
        fitting = (left // pairs - self.settle for pairs in (8, 4))
        steps = next((steps for steps in fitting if steps >= 3), left // 2 - self.settle)
        return replace(self, steps=max(1, min(self.steps, steps)))


@dataclass
class Arm:
    """A process and the live choices that are on in its windows."""

    process: Timed
    choices: Sequence[Choice] = ()
    suspended: bool = False
    """Only count steps, as `flatout run` does most of the time?"""

    def window(self, *, settle: int, steps: int) -> Window:
        return self.process.window(self.choices, settle=settle, steps=steps, suspended=self.suspended)


@dataclass(frozen=True, kw_only=True)
class Pairing:
    """The result of the windows of two arms."""

    comparison: Comparison
    baseline_seconds: float
    candidate_seconds: float
    startup_seconds: float | None
    """Cost of turning the candidate on; None: part of the steps, as whole runs were compared."""
    baseline_medians: tuple[float, ...] = ()
    candidate_medians: tuple[float, ...] = ()
    leak_bytes_per_step: float = 0.0
    peak_resident_bytes: tuple[int, int] | None = None
    """(baseline, candidate), where each has a process of its own."""
    mean_seconds: tuple[float, float] | None = None
    """(baseline, candidate), of all steps in the windows; None: whole runs were compared, where every step counts."""

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]], comparison: Comparison, startup_seconds: float | None) -> Pairing:
        """Of pairs of (baseline, candidate) seconds."""
        baseline, candidate = ([pair[side] for pair in pairs] for side in (0, 1))
        return cls(
            comparison=comparison,
            baseline_seconds=median(baseline),
            candidate_seconds=median(candidate),
            startup_seconds=startup_seconds,
            baseline_medians=tuple(baseline),
            candidate_medians=tuple(candidate),
        )


class RolledBackInside(TrialError):
    """A choice of the candidate could not be applied in the process."""


def warm_up(arm: Arm, pace: Pace, tried: Sequence[Choice] = ()) -> tuple[float, float]:
    """Run the first steps of an arm. Returns their cost beyond usual steps, and the usual step time, in seconds."""
    window = arm.window(settle=pace.warm_steps, steps=pace.first_window)
    raise_if_rolled_back(window, tried)
    usual = median(window.seconds)
    spent = sum(window.settle_seconds) + window.apply_seconds
    return max(0.0, spent - usual * len(window.settle_seconds)), usual


def late_compilation_seconds(window: Window) -> float:
    """How much longer than usual its longest step took, where that can only be a compilation: another graph, as of the
    first evaluation."""
    usual, longest = median(window.seconds), max(window.seconds)
    return longest - usual if longest > max(COMPILES_SECONDS, COMPILES_TIMES * usual) else 0.0


def compare_arms(
    baseline: Arm,
    candidate: Arm,
    pace: Pace,
    choice: Choice | None = None,
    collected: list[tuple[float, float]] | None = None,
) -> Pairing:
    """Pairs of windows until the verdict is clear, or the time or the pairs are used up.

    Each pair is also appended to `collected`, so that when the script ends half-way, the comparison continues after a
    restart.
    """
    began = time.monotonic()
    tried = tried_in(candidate, baseline, choice)
    startup, usual = warm_up(candidate, pace, tried)
    sides = _Side(baseline, pace.settle), _Side(candidate, pace.settle, usual)
    if baseline.process is not candidate.process:
        own, sides[0].usual_seconds = warm_up(baseline, pace)
        startup = max(0.0, startup - own)  # first steps of the script itself may take longer: it evaluates, say
    if not pace.counts_warm_up:
        began = time.monotonic()
    pairs = collected if collected is not None else []
    resident: list[tuple[int, int, bool]] = []
    means: list[tuple[float, float]] = []
    turn, late_graphs = pace.turns * len(pairs), 0  # the script of a restart comes to the same steps again
    while True:
        turns: list[tuple[float, float]] = []
        while len(turns) < pace.turns:
            ours, theirs = _one_turn(sides, pace, turn)
            raise_if_rolled_back(theirs, tried)
            turns.append((median(ours.seconds), median(theirs.seconds)))
            means.append((fmean(ours.seconds), fmean(theirs.seconds)))
            if choice is not None and choice.lever.compiles and late_graphs < MOST_LATE_GRAPHS:
                late = late_compilation_seconds(theirs)
                late_graphs += late > 0
                startup, began = startup + late, began + late * (not pace.counts_warm_up)
            resident.append((ours.resident_bytes, theirs.resident_bytes, candidate_first(turn)))
            turn += 1
            if ours.apply_seconds + theirs.apply_seconds > SWITCH_SHARE * (sum(ours.seconds) + sum(theirs.seconds)):
                pace = pace.in_one_turn()
        pairs.append(pair_of_turns(turns))
        if is_enough(pairs, pace, time.monotonic() - began):
            break
    comparison = compare_pairs(pairs, pace)
    floor = max(LEAK_FLOOR_BYTES_PER_STEP, LEAK_FLOOR_BYTES_PER_SECOND * median([pair[1] for pair in pairs]))
    suspicious = choice is not None and comparison.verdict == "faster" and _suspicious(resident, pace, floor)
    leak = leak_bytes_per_step(baseline, candidate, pace, floor) if suspicious else 0.0
    return replace(
        Pairing.of(pairs, comparison, startup),
        leak_bytes_per_step=leak,
        peak_resident_bytes=_peaks_of_processes(baseline, ours, candidate, theirs),
        mean_seconds=mean_of_each(means),
    )


def mean_of_each(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return fmean(ours for ours, _ in pairs), fmean(theirs for _, theirs in pairs)


def _peaks_of_processes(baseline: Arm, ours: Window, candidate: Arm, theirs: Window) -> tuple[int, int] | None:
    if baseline.process is candidate.process or ours.peak_resident_bytes is None or theirs.peak_resident_bytes is None:
        return None
    return ours.peak_resident_bytes, theirs.peak_resident_bytes


@dataclass
class _Side:
    """An arm, and the steps after a switch to it that are not counted."""

    arm: Arm
    settle: int
    usual_seconds: float | None = None
    """Of a step that follows others; None: unknown, as the process has run no such steps for this comparison."""

    def window(self, steps: int) -> Window:
        found = self.arm.window(settle=self.settle, steps=steps)
        if self.settle or self.usual_seconds is None or found.seconds[0] < FIRST_SLOWER * self.usual_seconds:
            return found
        self.settle = 1
        return self.arm.window(settle=self.settle, steps=steps)


def candidate_first(turn: int) -> bool:
    """Whose window comes first, in turns from 0 on: drawn for every other one, and the other way round in the next."""
    return (random.Random(turn // 2).random() < 0.5) is (turn % 2 == 0)


def _one_turn(sides: tuple[_Side, _Side], pace: Pace, number: int) -> tuple[Window, Window]:
    """A window of (baseline, candidate)."""
    baseline, candidate = sides
    if candidate_first(number):
        theirs, ours = candidate.window(pace.steps), baseline.window(pace.steps)
    else:
        ours, theirs = baseline.window(pace.steps), candidate.window(pace.steps)
    if baseline.arm.process is candidate.arm.process:  # what is slow to switch on may be slow to switch off
        baseline.settle = candidate.settle
    return ours, theirs


def compare_pairs(pairs: Sequence[tuple[float, float]], pace: Pace) -> Comparison:
    """Their comparison, given the looks that this pace has allowed."""
    if pace.stops_when_decided:
        return compare_so_far(pairs, least_gain=pace.least_gain)
    return compare_paired([pair[0] for pair in pairs], [pair[1] for pair in pairs], least_gain=pace.least_gain)


def is_enough(pairs: Sequence[tuple[float, float]], pace: Pace, seconds: float) -> bool:
    """Is the verdict clear, or the time or the number of pairs used up? seconds: taken so far."""
    if len(pairs) >= pace.most_pairs:
        return True
    if seconds > pace.seconds and len(pairs) >= pace.least_pairs:
        looks_faster = median([ours / theirs for ours, theirs in pairs]) >= LOOKS_FASTER
        if seconds > pace.longest_seconds or not looks_faster:
            return True
    return pace.stops_when_decided and is_decided(pairs, least_gain=pace.least_gain)


def _suspicious(resident: Sequence[tuple[int, int, bool]], pace: Pace, floor: float) -> bool:
    """resident: bytes of memory after the windows of each turn: (baseline, candidate, did the candidate come first?).

    Did the process grow in the candidate's windows as a leak does, and more than in the baseline's? Cheap, with
    false positives: there are few windows, and steps that last seconds leave no time to look again at every lever.

    Only growth between two windows of one arm that follow each other is the arm's own, because switching a lever may
    itself allocate and free memory.
    """
    turns = list(itertools.pairwise(resident))
    ours = [float(after - before) for (before, _, first), (after, _, then) in turns if first and not then]
    theirs = [float(after - before) for (_, before, first), (_, after, then) in turns if then and not first]
    if not theirs:
        return False
    least = floor * (pace.settle + pace.steps)
    return _is_steady(theirs) and median(theirs) > max(least, median(ours) if ours else 0.0)


def _is_steady(growths: Sequence[float]) -> bool:
    """Does it grow by about the same in every window? An allocator that rearranges itself grows once, or up and
    down."""
    return min(growths) >= 0.5 * median(growths)


def leak_bytes_per_step(baseline: Arm, candidate: Arm, pace: Pace, floor: float) -> float:
    """Bytes that each step adds under the candidate beyond the baseline; 0 if there is no steady growth above `floor`.

    Each arm runs several windows in a row.
    """
    steps = pace.settle + pace.steps
    theirs = _growths(candidate, pace)
    if not _is_steady(theirs):
        return 0.0
    growth = (median(theirs) - max(0.0, median(_growths(baseline, pace)))) / steps
    return growth if growth > floor else 0.0


def _growths(arm: Arm, pace: Pace) -> list[float]:
    sizes = [arm.window(settle=pace.settle, steps=pace.steps).resident_bytes for _ in range(LEAK_WINDOWS + 1)]
    return [float(after - before) for before, after in itertools.pairwise(sizes)]


def raise_if_rolled_back(window: Window, tried: Sequence[Choice]) -> None:
    for choice in tried:
        if choice.lever.name in window.rolled_back:
            which = f"{choice.label} " if len(tried) > 1 else ""
            raise RolledBackInside(which + window.rolled_back[choice.lever.name])


def tried_in(candidate: Arm, baseline: Arm, choice: Choice | None) -> list[Choice]:
    """What the candidate has and the baseline has not, with this choice; none where there is no choice to judge."""
    if choice is None:
        return []
    return [choice, *(one for one in candidate.choices if one not in baseline.choices and one != choice)]


# whole runs

Start = Callable[[], AbstractContextManager[Arm]]
"""Starts a new run, waits for its first step, and ends it on exit."""


@dataclass(frozen=True, kw_only=True)
class FewSteps:
    """The length of a script whose runs are compared whole."""

    steps: int
    """Of the script."""
    compared: int
    """Steps after the first, at whose end a trial takes commands and `flatout run` turns levers on."""

    @property
    def pace(self) -> Pace:
        """Of pairs of runs."""
        return Pace(steps=self.compared, settle=0, warm_steps=0)

    def pair_seconds(self, step_seconds: float, restart_seconds: float) -> float:
        """Of a pair of runs, first steps included."""
        return 2 * (restart_seconds + self.compared * step_seconds)

    def least_seconds(self, step_seconds: float, restart_seconds: float) -> float:
        """Of the fewest pairs that can decide."""
        return LOOKS[0] * self.pair_seconds(step_seconds, restart_seconds)


def few_steps(end: TrialEnded, step_seconds: float | None) -> FewSteps | None:
    """The length of a script that has ended; None where windows fit into it, even of single long steps, or where the
    step time is unknown."""
    if step_seconds is None:
        return None
    few = FewSteps(steps=end.script_steps, compared=end.steps - 1)
    pace = Pace.for_step(step_seconds, seconds=0.0)
    if end.steps >= FEWEST_STEPS:
        pace = pace_within(pace, end.steps)
    return None if pace.fits(few.compared) else few


def pace_within(pace: Pace, total_steps: int) -> Pace:
    """The same, with shorter windows where a script of that length would not give a single pair otherwise."""
    return pace if pace.fits(total_steps - 1) else pace.within(total_steps)


def compare_whole_runs(
    baseline: Start,
    candidate: Start,
    few: FewSteps,
    pace: Pace,
    choice: Choice | None = None,
    has_time: Callable[[], bool] = lambda: False,
) -> Pairing:
    """Pairs of runs, until the verdict is clear, or `pace.seconds` or the pairs are used up. Seconds are per mean step.

    More pairs follow, up to eight, while every pair shows a gain and `has_time` allows another.

    Raises RolledBackInside where `choice` was taken back in its run, TrialEnded where a run is shorter than `few` says.
    """
    began = time.monotonic()
    pairs: list[tuple[float, float]] = []
    while not is_enough(pairs, pace, time.monotonic() - began) or (_is_promising(pairs, pace) and has_time()):
        pairs.append(pair_of_runs(baseline, candidate, few, len(pairs), choice))
    return pairing_of_runs(pairs, pace)


def _is_promising(pairs: Sequence[tuple[float, float]], pace: Pace) -> bool:
    """Of pairs that ran out of time without a verdict: is every one a gain? Three are few where runs differ."""
    if len(pairs) >= WANTED_PAIRS or is_decided(pairs, least_gain=pace.least_gain):
        return False
    return all(ours / theirs > 1 + pace.least_gain for ours, theirs in pairs)


def pair_of_runs(
    baseline: Start, candidate: Start, few: FewSteps, number: int, choice: Choice | None = None
) -> tuple[float, float]:
    """(baseline, candidate) seconds of a mean step. The second starts when the first has ended, since memory may only
    suffice for one. Which comes first alternates with the pair's number."""
    runs, arms = {}, {}
    for side in (baseline, candidate) if number % 2 == 0 else (candidate, baseline):
        with side() as arm:
            runs[side], arms[side] = arm.window(settle=0, steps=few.compared), arm
    raise_if_rolled_back(runs[candidate], tried_in(arms[candidate], arms[baseline], choice))
    ours, theirs = ((sum(run.seconds) + run.apply_seconds) / few.compared for run in (runs[baseline], runs[candidate]))
    return ours, theirs


def pairing_of_runs(pairs: list[tuple[float, float]], pace: Pace) -> Pairing:
    """The result of pairs of whole runs; start-up is part of them."""
    return Pairing.of(pairs, compare_pairs(pairs, pace), None)
