"""The search for the choices that make a model faster on a sample of its inputs.

Each is applied on top of what has been kept so far, checked against fp32, and only then timed in alternation with it.
A dropped choice is tried again when others were kept after it. See `flatout.search`.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

import torch

from flatout.errors import describe_error
from flatout.infer.choosing.closeness import ROUNDING_ERROR, Accuracy, Tolerance
from flatout.levers.break_even import Counted
from flatout.levers.observed import Observed
from flatout.levers.threads import Threads
from flatout.machine.description import Machine
from flatout.memory.out_of_memory import is_out_of_memory
from flatout.plan import Plan
from flatout.plan_choices import ChoiceValue, Exactness, allowed, declared, worst
from flatout.search.deadline import Deadline
from flatout.search.search import Progress, Proposal, Search
from flatout.search.trial import Measured, Record
from flatout.sequential import FAR_SLOWER_PAIRS, LOOKS, compare_so_far, is_decided, pair_of_turns
from flatout.statistics import Comparison, median
from flatout.timing import Clock, interleave
from flatout.units import format_seconds

if TYPE_CHECKING:
    from flatout.infer.choosing.tuned_generation import GeneratingRunner, TunedGeneration
    from flatout.infer.choosing.tuned_prediction import PredictingRunner, TunedPrediction

    Subject: TypeAlias = TunedGeneration | TunedPrediction
    Runner: TypeAlias = GeneratingRunner | PredictingRunner

LEAST_GAIN: dict[Exactness, float] = {"bit-identical": 0.01, "rounding": 0.01, "reduced": 0.03}
"""Fewer bits must gain more than 1 %."""
FAR_SLOWER = 2.5
"""A run this many times slower than the current one is not timed further, if a second run confirms it."""
TOO_SHORT_TO_TELL_SECONDS = 0.3
"""Single runs below it are too noisy to judge, and timing them properly is cheap."""
LEAST_COMPILE_SECONDS = 5.0
CHOICE_SECONDS = 20.0
FINAL_SHARE = 0.12
"""Share of the budget reserved for the final comparison."""
WINDOW_SECONDS, PAIR_SECONDS = 0.03, 0.15
"""Shorter runs are repeated within a window, and shorter windows taken in turns within a pair: see
`flatout.sequential.pair_of_turns`."""
MOST_RUNS = 200
MOST_TURNS = 6
FINAL_LOOKS = LOOKS[LOOKS.index(6) :]
"""Fewer pairs decide, but their intervals are wide."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """One change that may help: the fields of the plan that it sets, and those that it replaces."""

    label: str
    choices: Mapping[str, ChoiceValue]
    replaces: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()
    """Fields of the plan that make it pointless once they are kept."""
    instead_of: tuple[str, ...] = ()
    """Fields that it may replace where it cannot be combined with them."""

    @property
    def exactness(self) -> Exactness:
        """What it is declared to do to the numbers."""
        return worst(declared()[name].exactness for name in self.choices)

    def on(self, plan: Plan) -> Plan:
        """The plan with this change."""
        make: Callable[..., Plan] = Plan  # which checks its choices itself
        chosen = {name: value for name, value in plan.choices().items() if name not in self.replaces}
        chosen |= self.choices
        return make(**chosen, reasons={name: why for name, why in plan.reasons.items() if name in chosen})


def thread_options(machine: Machine) -> list[Option]:
    """Numbers of threads worth trying on this CPU."""
    seen = Observed(device="cpu", threads=torch.get_num_threads())
    return [Option(label=f"threads {n}", choices={"threads": n}) for n in Threads().applies(machine, seen).values]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What bounds a search."""

    seconds: float
    exactness: Exactness = "reduced"
    tolerance: Tolerance = field(default_factory=Tolerance)
    items: int | None = None


UNJUDGED = Accuracy(error=math.inf, largest_error=math.inf)


@dataclass
class Made:
    """The model made ready under one plan, what that cost, and how near it is to fp32.

    A runner's `first` runs the sample once, compiling what there is to compile, and says what keeps the plan from being
    carried out ('' = it is); `run` is what is timed; `judge` compares its outputs with fp32.
    """

    plan: Plan
    runner: Runner
    startup_seconds: float
    usual_seconds: float
    """Of a run of the sample, once warm."""
    obstacle: str
    accuracy: Accuracy = UNJUDGED


class InferenceSearch(Search[Option]):
    """One search. `run` fills `state`, `current` and `final`."""

    state: Record[Option]
    worth_beside_others = 0.9

    def __init__(
        self,
        subject: Subject,
        base: Plan,
        options: Sequence[Option],
        limits: Limits,
        progress: Progress = lambda text: None,
        clock: Clock = time.perf_counter,
        deadline: Deadline | None = None,
    ) -> None:
        deadline = (deadline or Deadline(limits.seconds, clock=clock)).reserving(FINAL_SHARE * limits.seconds)
        super().__init__(Record(), deadline, progress)
        self.counted = Counted(
            unit=f"{subject.unit}s", unknown="how many will be served is unknown: items=", known="there are"
        )
        self.subject, self.limits = subject, limits
        self._options = {option.label: option for option in options}
        self.final: Turns | None = None
        """The new plan in turns with the given one; None where nothing was kept."""
        self._base, self._clock = base, clock
        self._obstructed: Option | None = None
        """The last option that could not be made."""
        self._made_last: Made | None = None

    @property
    def total(self) -> int | None:
        return self.limits.items

    @property
    def usual_trial_seconds(self) -> float:
        return 6 * self.plain.usual_seconds

    def observe(self) -> None:
        self.plain = self._made(self._base)
        self.plain.accuracy = self.plain.runner.judge()
        self.current = self.plain

    def run(self) -> Record[Option]:
        super().run()
        self._compare_the_whole()
        return self.state

    # what is proposed

    def names(self) -> Sequence[str]:
        return list(self._options)

    def proposal(self, name: str) -> Proposal[Option]:
        option = self._options[name]
        reason = self._refusal(option)
        return Proposal(label=name, candidates=() if reason else (option,), reason=reason)

    def after_proposal(self, name: str) -> None:
        """An option that cannot be combined with a kept choice may be better than it."""
        option = self._options[name]
        held = [field for field in option.instead_of if field in self.current.plan.choices()]
        if held and self._obstructed is option:
            label = f"{option.label} without {' and '.join(held)}"
            self._try(replace(option, label=label, replaces=(*option.replaces, *held)))

    def _refusal(self, option: Option) -> str:
        if not allowed(option.exactness, self.limits.exactness):
            return f"it is {option.exactness}, and exactness is {self.limits.exactness}"
        chosen = self.current.plan.choices()
        for name in option.unless:
            if name in chosen:
                return f"{name} = {chosen[name]} is kept"
        for name in (*option.choices, *option.replaces):
            if name in self._base.choices():
                return f"the plan that was given sets {name}"
        return self._too_short_to_compile() if "compile" in option.choices else ""

    def _too_short_to_compile(self) -> str:
        """Compiling takes seconds at least, and cannot save more than all the items take."""
        if self.limits.items is None:
            return ""
        whole = self.limits.items * self.current.usual_seconds / self.subject.count
        if whole > LEAST_COMPILE_SECONDS:
            return ""
        return f"{self.limits.items:,} {self.subject.unit}s take {format_seconds(whole)}: too short to pay off"

    # one choice

    def measure(self, wanted: Sequence[Option], tried: Sequence[Option]) -> Measured:
        self._obstructed = self._made_last = None
        self._free()
        try:
            self._made_last = made = self._made(self._plan(wanted))
            return replace(self._judge(tried, made), notes=tuple(made.runner.notes))
        except Exception as error:  # the model is not ours, nor are torch's kernels: whatever it is, the choice failed
            self._obstructed = tried[-1]
            what = describe_error(error)
            return Measured(outcome="failed", reason=f"out of memory ({what})" if is_out_of_memory(error) else what)

    def on_kept(self, wanted: Sequence[Option], tried: Sequence[Option]) -> None:
        assert self._made_last is not None
        self.current = self._made_last

    def without(self, choice: Option, others: Sequence[Option]) -> Comparison | None:
        self._made_last = None
        self._free()
        try:
            self._made_last = made = self._made(self._plan(others))
            made.accuracy = made.runner.judge()
            if made.obstacle or self.limits.tolerance.why_not(made.accuracy, self.plain.accuracy):
                return None
            runs = (self.current.runner.run, made.runner.run)
            return in_turns(*runs, seconds=CHOICE_SECONDS / 2, clock=self._clock).comparison
        except Exception:  # it stays
            return None

    def on_dropped(self, choice: Option, others: Sequence[Option]) -> None:
        assert self._made_last is not None
        self.current = self._made_last

    def _plan(self, wanted: Sequence[Option]) -> Plan:
        plan = self._base
        for one in wanted:
            plan = one.on(plan)
        return plan

    def _made(self, plan: Plan) -> Made:
        began = self._clock()
        runner = self.subject.make(plan)
        obstacle = runner.first()
        first = self._clock() - began
        usual = self._seconds(runner)
        return Made(plan, runner, max(0.0, first - usual), usual, obstacle)

    @staticmethod
    def _free() -> None:
        """What was made before: there must be room for the next."""
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _judge(self, tried: Sequence[Option], made: Made) -> Measured:
        """Near enough to fp32, and then faster?"""
        if reason := made.obstacle or self._far_slower(made):
            self._obstructed = tried[-1] if made.obstacle else None
            return Measured(outcome="dropped", reason=reason)
        made.accuracy = made.runner.judge()
        exactness = self._seen(tried, made)
        reason = ""
        if not allowed(exactness, self.limits.exactness):
            reason = f"on the sample it is {exactness} ({made.accuracy}), and exactness is {self.limits.exactness}"
        elif far := self.limits.tolerance.why_not(made.accuracy, self.plain.accuracy):
            reason = f"not near enough to fp32: {far}"
        found = Measured(outcome="dropped", reason=reason) if reason else self._timed(made, LEAST_GAIN[exactness])
        return replace(found, exactness=exactness, accuracy=made.accuracy)

    def _far_slower(self, made: Made) -> str:
        """A sentence if single runs, in turns, leave no doubt."""
        if made.usual_seconds < max(FAR_SLOWER * self.current.usual_seconds, TOO_SHORT_TO_TELL_SECONDS):
            return ""
        ours, theirs = self._seconds(self.current.runner), self._seconds(made.runner)
        self.current.usual_seconds = min(ours, self.current.usual_seconds)
        if theirs < FAR_SLOWER * ours:
            return ""
        return f"far slower: {format_seconds(theirs)} for the sample instead of {format_seconds(ours)}"

    def _seconds(self, runner: Runner) -> float:
        began = self._clock()
        runner.run()
        return self._clock() - began

    def _seen(self, tried: Sequence[Option], made: Made) -> Exactness:
        """What it does to the numbers: as declared, unless the sample shows worse."""
        now, before = made.accuracy, self.current.accuracy
        seen: Exactness = "bit-identical" if now.same_bits else "rounding"
        if not before.same_bits and now.error <= 1.5 * before.error:
            seen = "bit-identical"  # beside what is on already nothing can be seen
        elif now.error > ROUNDING_ERROR:
            seen = "reduced"
        return worst((*(option.exactness for option in tried), seen))

    def _timed(self, made: Made, least_gain: float) -> Measured:
        """Against what is kept."""
        seconds = min(CHOICE_SECONDS, max(1.0, self._remaining() / (self._left + 2)))
        turns = in_turns(
            self.current.runner.run, made.runner.run, seconds=seconds, least_gain=least_gain, clock=self._clock
        )
        each = (turns.baseline_seconds / self.subject.count, turns.candidate_seconds / self.subject.count)
        startup = max(0.0, made.startup_seconds - self.current.startup_seconds)
        return self.judged(turns.comparison, each, startup)

    def _compare_the_whole(self) -> None:
        """The new plan against the given one, once more and in turns. What cannot be shown again is not promised."""
        if not self.state.kept:
            return
        self._progress("measuring the plan against the model as it is")
        seconds = max(5.0, FINAL_SHARE * self.limits.seconds)
        self.final = in_turns(
            self.plain.runner.run, self.current.runner.run, seconds=seconds, final=True, clock=self._clock
        )
        found = self.final.comparison
        if found.verdict != "faster":
            reason = f"faster by itself, but the whole was not (x{found.ratio:.2f}, {found.verdict})"
            self.state.take_back(self.state.kept, "dropped", reason)
            self.state.kept, self.current, self.final = [], self.plain, None


@dataclass(frozen=True, kw_only=True)
class Turns:
    """What the windows gave, in seconds of one run of the sample."""

    comparison: Comparison
    baseline_seconds: float
    candidate_seconds: float


def in_turns(
    baseline: Callable[[], object],
    candidate: Callable[[], object],
    *,
    seconds: float,
    least_gain: float = 0.01,
    final: bool = False,
    clock: Clock = time.perf_counter,
) -> Turns:
    """Compare the two, both already warm. `seconds` bounds it once there are enough pairs for a verdict.

    final: never stop early for futility, since the ratio itself is reported.
    """
    began = clock()
    runs, turns = _runs_and_turns(candidate, clock)
    pairs: list[tuple[float, float]] = []
    functions = {"baseline": _repeated(baseline, runs), "candidate": _repeated(candidate, runs)}
    for look in FINAL_LOOKS if final else (FAR_SLOWER_PAIRS, *LOOKS):
        found = interleave(functions, turns * (look - len(pairs)), warmup=0, clock=clock)
        ours, theirs = ([one / runs for one in found[name].samples_seconds] for name in ("baseline", "candidate"))
        taken = list(zip(ours, theirs, strict=True))
        pairs += [pair_of_turns(taken[at : at + turns]) for at in range(0, len(taken), turns)]
        if is_decided(pairs, least_gain=least_gain, stop_if_futile=not final):
            break
        if clock() - began > seconds and look >= LOOKS[0]:
            break
    return Turns(
        comparison=compare_so_far(pairs, least_gain=least_gain),
        baseline_seconds=median([ours for ours, _ in pairs]),
        candidate_seconds=median([theirs for _, theirs in pairs]),
    )


def _runs_and_turns(run: Callable[[], object], clock: Clock) -> tuple[int, int]:
    """How many runs a window has, and how many windows of each a pair."""
    start = clock()
    run()
    seconds = max(clock() - start, 1e-9)
    runs = max(1, min(MOST_RUNS, round(WINDOW_SECONDS / seconds)))
    return runs, max(1, min(MOST_TURNS, round(PAIR_SECONDS / (runs * seconds))))


def _repeated(run: Callable[[], object], runs: int) -> Callable[[], object]:
    def window() -> None:
        for _ in range(runs):
            run()

    return window
