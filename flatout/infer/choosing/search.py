"""Find the choices for inference that help, one at a time, on the user's own sample.

Each is made beside what has been kept so far, judged (is it near enough to fp32?), and only then timed in turns with
it. What was dropped gets another look when others were kept after it, pairs that interact are tried together, and
each kept choice must show that it still earns its place. A failure is a dropped choice with its reason, never the
search's.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from flatout.infer.choosing.closeness import ROUNDING_ERROR, Accuracy, Tolerance
from flatout.infer.choosing.in_turns import Turns, in_turns
from flatout.infer.choosing.tuning import InferenceTrial, Outcome
from flatout.levers.break_even import Counted, describe, payoff_steps, pays
from flatout.memory.out_of_memory import is_out_of_memory
from flatout.plan import Plan
from flatout.plan_choices import Exactness, allowed, declared, worst
from flatout.timing import Clock
from flatout.units import format_seconds

LEAST_GAIN: dict[Exactness, float] = {"bit-identical": 0.01, "rounding": 0.01, "reduced": 0.03}
"""Fewer bits must bring more than a trifle."""
FAR_SLOWER = 2.5
"""A run that takes so many times as long as the one before it is not worth windows; twice, as one may be unlucky."""
TOO_SHORT_TO_TELL_SECONDS = 0.3
"""Single runs below it may be anything, and windows of them cost little."""
LEAST_COMPILE_SECONDS = 5.0
WORTH_A_SECOND_LOOK = 0.9
WORTH_A_PAIR = 0.8
CHOICE_SECONDS = 20.0
FINAL_SHARE = 0.12
"""Of the budget: what is kept back for the last comparison."""


@dataclass(frozen=True, kw_only=True)
class Option:
    """One change that may help: the fields of the plan that it sets, and those that it takes the place of."""

    label: str
    choices: Mapping[str, Any]
    replaces: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()
    """Fields of the plan that, once kept, make it pointless."""
    instead_of: tuple[str, ...] = ()
    """Fields whose place it may take where it cannot stand beside them."""
    pairs_with: str = ""
    """The field of a choice with which it may help although neither does alone."""

    @property
    def exactness(self) -> Exactness:
        """What it is declared to do to the numbers."""
        return worst(declared()[name].exactness for name in self.choices)

    def on(self, plan: Plan) -> Plan:
        """The plan with this change."""
        chosen = {name: value for name, value in plan.choices().items() if name not in self.replaces}
        chosen |= self.choices
        return Plan(**chosen, reasons={name: why for name, why in plan.reasons.items() if name in chosen})


class Runner(Protocol):
    """The model made ready under one plan."""

    notes: Sequence[str]

    def first(self) -> str:
        """Run the sample once, compiling what there is to compile. Returns what keeps the plan from being carried
        out; '' if it is."""
        ...

    def run(self) -> object:
        """Run the sample: what is timed."""
        ...

    def judge(self) -> Accuracy:
        """Its outputs against fp32."""
        ...

    def share(self) -> str:
        """In words: the share that a run reaches of the limit that binds."""
        ...


class Subject(Protocol):
    """What is tuned: a model with a sample of its inputs."""

    unit: str
    count: int
    """Items in a run."""

    def make(self, plan: Plan) -> Runner: ...


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
    """A runner, what making it cost, and how near it is to fp32."""

    plan: Plan
    runner: Runner
    startup_seconds: float
    usual_seconds: float
    """Of a run of the sample, once warm."""
    obstacle: str
    accuracy: Accuracy = UNJUDGED


class InferenceSearch:
    """One search. `run` fills `trials`, `kept` and the rest."""

    def __init__(
        self,
        subject: Subject,
        base: Plan,
        options: Sequence[Option],
        limits: Limits,
        progress: Callable[[str], None] = lambda text: None,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.subject, self.options, self.limits = subject, options, limits
        self.trials: list[InferenceTrial] = []
        self.kept: list[Option] = []
        self._base, self._progress, self._clock = base, progress, clock
        self._deadline = clock() + limits.seconds * (1 - FINAL_SHARE)
        self._left = len(options)
        self._replaced: list[Option] = []
        self._obstructed: Option | None = None
        """The last option that could not be made."""
        self.plain = self._made(base)
        self.plain.accuracy = self.plain.runner.judge()
        self.current = self.plain
        self.final: Turns | None = None

    def run(self) -> None:
        for option in self.options:
            self._try(option)
            self._try_instead(option)
            self._left -= 1
        self._second_look()
        self._try_pairs()
        self._drop_the_idle()
        self._compare_the_whole()

    # one choice

    def _try(self, option: Option) -> None:
        reason = self._refusal(option)
        if not reason and self._remaining() <= 0:
            reason = f"the budget of {format_seconds(self.limits.seconds)} was spent"
            self._record(option, "not tried", reason)
            self._update(for_lack_of_time=True)
            return
        if reason:
            self._record(option, "not tried", reason)
            return
        self._progress(f"trying {option.label}")
        began = self._clock()
        before = list(self.kept)
        self._record(option, "failed", "")
        try:
            made = self._made(option.on(self.current.plan))
            self._judge(option, made)
        except Exception as error:  # the model is not ours, nor are torch's kernels: whatever it is, the choice failed
            self._update(outcome="failed", reason=_said(error))
            self._obstructed = option
            del error  # its frames hold the model that did not fit
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self._update(cost_seconds=self._clock() - began, on_top_of=tuple(one.label for one in before))

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
        return f"{self.limits.items:,} {self.subject.unit}s take {format_seconds(whole)}: no time to earn it back"

    def _made(self, plan: Plan) -> Made:
        began = self._clock()
        runner = self.subject.make(plan)
        obstacle = runner.first()
        first = self._clock() - began
        usual = self._seconds(runner)
        return Made(plan, runner, max(0.0, first - usual), usual, obstacle)

    def _judge(self, option: Option, made: Made) -> None:
        """Keep it or not; the trial was recorded before."""
        self._update(outcome="dropped", notes=tuple(made.runner.notes))
        if reason := made.obstacle or self._far_slower(made):
            self._obstructed = option if made.obstacle else None
            self._update(reason=reason)
            return
        made.accuracy = made.runner.judge()
        exactness = self._seen(option, made)
        self._update(exactness=exactness, accuracy=made.accuracy)
        if not allowed(exactness, self.limits.exactness):
            reason = f"on the sample it is {exactness} ({made.accuracy}), and exactness is {self.limits.exactness}"
            self._update(reason=reason)
        elif reason := self.limits.tolerance.why_not(made.accuracy, self.plain.accuracy):
            self._update(reason=f"not near enough to fp32: {reason}")
        elif self._faster(made, LEAST_GAIN[exactness]):
            self._keep(option, made)

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

    def _seen(self, option: Option, made: Made) -> Exactness:
        """What it does to the numbers: as declared, unless the sample shows worse."""
        now, before = made.accuracy, self.current.accuracy
        seen: Exactness = "bit-identical" if now.same_bits else "rounding"
        if not before.same_bits and now.error <= 1.5 * before.error:
            seen = "bit-identical"  # beside what is on already nothing can be seen
        elif now.error > ROUNDING_ERROR:
            seen = "reduced"
        return worst((option.exactness, seen))

    def _faster(self, made: Made, least_gain: float) -> bool:
        """Timed against what is kept; the verdict goes into the last trial."""
        seconds = min(CHOICE_SECONDS, max(1.0, self._remaining() / (self._left + 2)))
        turns = in_turns(
            self.current.runner.run, made.runner.run, seconds=seconds, least_gain=least_gain, clock=self._clock
        )
        count = self.subject.count
        before, after = turns.baseline_seconds / count, turns.candidate_seconds / count
        startup = max(0.0, made.startup_seconds - self.current.startup_seconds)
        payoff = payoff_steps(startup, before, after)
        counted = Counted(
            unit=f"{self.subject.unit}s", unknown="how many will be served is unknown: items=", known="there are"
        )
        cost = describe(startup, payoff, self.limits.items, counted)
        found = turns.comparison
        faster, paying = found.verdict == "faster", pays(payoff, self.limits.items)
        self._update(
            outcome="kept" if faster and paying else "dropped",
            reason=(cost or "faster") if faster else _why_not_faster(turns, least_gain),
            baseline_seconds=before,
            candidate_seconds=after,
            comparison=found,
            startup_seconds=startup,
            payoff_items=payoff,
        )
        return faster and paying

    def _keep(self, option: Option, made: Made) -> None:
        gone = [one for one in self.kept if set(one.choices) & {*option.choices, *option.replaces}]
        self._replaced += gone
        for one in gone:
            self._take_back(one, f"{option.label} took its place")
        self.kept.append(option)
        self.current = made

    # what one choice changes for another

    def _try_instead(self, option: Option) -> None:
        """What could not be made beside a kept choice may be better than that."""
        held = [name for name in option.instead_of if name in self.current.plan.choices()]
        if held and self._obstructed is option:
            label = f"{option.label} without {' and '.join(held)}"
            self._try(replace(option, label=label, replaces=(*option.replaces, *held)))

    def _second_look(self) -> None:
        """What did not help the slower model may help the faster one."""
        tried = [(option, self._trial_of(option)) for option in self.options]
        for option, trial in tried:
            if option in self._replaced:
                continue
            if trial is None or trial.outcome != "dropped" or trial.comparison is None or option in self.kept:
                continue
            later = [one.label for one in self.kept if one.label not in trial.on_top_of]
            same_field = any(set(option.choices) & set(one.choices) for one in self.kept)
            if later and not same_field and trial.comparison.ratio > WORTH_A_SECOND_LOOK and self._remaining() > 0:
                self._try(option)

    def _try_pairs(self) -> None:
        """Two of which at least one was dropped for being slow may help together."""
        fields = {name for one in self.kept for name in one.choices}
        for option in self.options:
            if not option.pairs_with or fields & {*option.choices, option.pairs_with}:
                continue
            partners = [one for one in self.options if option.pairs_with in one.choices and self._plausible(one)]
            if self._plausible(option) and partners and self._remaining() > 0:
                self._try(_both(option, partners[0]))
                fields = {name for one in self.kept for name in one.choices}

    def _plausible(self, option: Option) -> bool:
        trial = self._trial_of(option)
        return trial is not None and trial.comparison is not None and trial.comparison.ratio > WORTH_A_PAIR

    def _drop_the_idle(self) -> None:
        """Take each kept choice away once, oldest first: what a later one has made useless goes."""
        if len(self.kept) < 2:
            return
        for option in list(self.kept[:-1]):
            if self._remaining() <= 0:
                return
            self._progress(f"is {option.label} still needed?")
            plan = self._base
            others = [one for one in self.kept if one is not option]
            for one in others:
                plan = one.on(plan)
            try:
                made = self._made(plan)
                made.accuracy = made.runner.judge()
                if made.obstacle or self.limits.tolerance.why_not(made.accuracy, self.plain.accuracy):
                    continue
                turns = in_turns(
                    self.current.runner.run, made.runner.run, seconds=CHOICE_SECONDS / 2, clock=self._clock
                )
            except Exception:  # it stays
                continue
            if turns.comparison.ratio >= 1:  # by the estimate alone: in doubt the simpler plan
                gain = f"x{turns.comparison.ratio:.2f} without it"
                self._take_back(option, f"no longer helps beside those kept after it: {gain}")
                self.kept, self.current = others, made

    def _compare_the_whole(self) -> None:
        """The new plan against the given one, once more and in turns. What cannot be shown again is not promised."""
        if not self.kept:
            return
        self._progress("measuring the plan against the model as it is")
        seconds = max(5.0, FINAL_SHARE * self.limits.seconds)
        self.final = in_turns(
            self.plain.runner.run, self.current.runner.run, seconds=seconds, final=True, clock=self._clock
        )
        found = self.final.comparison
        if found.verdict != "faster":
            for option in list(self.kept):
                self._take_back(
                    option, f"faster by itself, but the whole was not (x{found.ratio:.2f}, {found.verdict})"
                )
            self.current, self.final = self.plain, None

    # the record

    def _remaining(self) -> float:
        return self._deadline - self._clock()

    def _record(self, option: Option, outcome: Outcome, reason: str) -> None:
        self.trials.append(
            InferenceTrial(
                label=option.label,
                choices=option.choices,
                exactness=option.exactness,
                outcome=outcome,
                reason=reason,
            )
        )

    def _update(self, **changes: Any) -> None:
        self.trials[-1] = replace(self.trials[-1], **changes)

    def _trial_of(self, option: Option) -> InferenceTrial | None:
        return next((trial for trial in reversed(self.trials) if trial.label == option.label), None)

    def _take_back(self, option: Option, reason: str) -> None:
        self.kept = [one for one in self.kept if one is not option]
        self.trials = [
            replace(trial, outcome="dropped", reason=reason)
            if trial.outcome == "kept" and trial.label == option.label
            else trial
            for trial in self.trials
        ]


def _both(first: Option, second: Option) -> Option:
    return Option(
        label=f"{second.label} + {first.label}",
        choices={**second.choices, **first.choices},
        replaces=(*first.replaces, *second.replaces),
    )


def _why_not_faster(turns: Turns, least_gain: float) -> str:
    found = turns.comparison
    if found.verdict == "not significant" and found.ratio < 1:
        return f"not faster in {found.pairs} pairs of windows"
    if found.verdict == "not significant":
        return f"not significant: {found.reason}"
    return found.verdict if found.verdict == "slower" else f"the gain is below {least_gain:.0%}"


def _said(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    what = f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
    return f"out of memory ({what})" if is_out_of_memory(error) else what
