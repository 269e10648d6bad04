"""Find the changes that help, one at a time, each on top of what has been kept so far.

The most promising change comes first, ranked again whenever one is kept; of a change with several values, the best
value of each comes before any second one. Each is measured in alternation with what is kept, and kept if it is
significantly faster. What was dropped is tried again once a change that it interacts with is kept; other changes that
were refused or dropped may be retried later, as where the machine was busy meanwhile; pairs of which neither was kept
are tried together, and at the end each kept change is tested against the others without it. A change that fails is
dropped and the search goes on; what there was no time for is listed, with a budget that would be enough.

`Search` is the same for a script, a training step and a model with inputs: a subclass says what may be tried
(`names`, `proposal`, `promise`) and measures it (`measure`, `on_kept`). All time is read from the deadline, whose clock
tests replace.
"""

from __future__ import annotations

import contextlib
import math
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Generic, Literal

from flatout.levers.break_even import Counted, describe, payoff_steps, pays
from flatout.levers.catalogue import INTERACTING
from flatout.levers.lever import Saving
from flatout.plan_choices import worst
from flatout.search.deadline import BudgetSpent, Deadline
from flatout.search.trial import C, Measured, NotTried, Record, Trial
from flatout.signals import told_of
from flatout.statistics import Comparison
from flatout.units import format_seconds

Progress = Callable[[str], None]

UNDECIDED_FROM = 1.01
"""Speedup from which a change that was dropped as not significant is retried, if there is time."""
BUSY_FROM = 1.5
"""A trial whose steps, without the change, took this many times as long as those of another was measured while the
machine was busy: its result is not reliable."""
MUCH_SLOWER = 0.8
"""Speedup below which a change is not worth a second trial together with another one."""
STOPPING = "ending; what was found so far is checked first (Ctrl-C again: end without a plan)"
LEAST_MORE = 1.25
"""Times the budget that was too short, at least."""
SEARCH_SHARE = 0.5
"""The least share of a suggested budget that goes to trials."""


@dataclass(frozen=True, kw_only=True)
class Proposal(Generic[C]):
    """A lever with the values to try, or one option."""

    label: str
    candidates: tuple[C, ...] = ()
    """Empty: not tried, for `reason`."""
    reason: str = ""


class Search(ABC, Generic[C]):
    """One search. `run` fills the record; a signal handler may end it with `stop`."""

    counted: Counted = Counted()
    """The unit of the break-even point: steps, or items."""
    worth_beside_others: float = math.inf
    """Speedup from which a dropped change is retried on top of what was kept since."""

    def __init__(self, state: Record[C], deadline: Deadline, progress: Progress) -> None:
        self.state = state
        """A Record, or a subclass."""
        self._deadline, self._progress = deadline, progress
        self._left = 1
        """Open proposals."""
        self._ended = False
        self._tried: list[tuple[Trial, tuple[C, ...]]] = []
        self._begun: dict[str, set[str]] = {}
        """Proposal -> candidates that were tried alone, or skipped for lack of time."""
        self._tried_again: set[tuple[str, str]] = set()
        """A dropped change, and the kept one for whose sake it was proposed once more."""
        self._found_needed: set[tuple[str, ...]] = set()
        """A kept change, followed by those it was tested with: all of them with it against all without it."""

    # what is searched

    @abstractmethod
    def observe(self) -> None:
        """Observe the subject as it is."""

    @abstractmethod
    def names(self) -> Sequence[str]:
        """Names of everything that may be proposed."""

    @abstractmethod
    def proposal(self, name: str) -> Proposal[C]:
        """What to try of it now, or why nothing."""

    def promise(self, name: str) -> tuple[float, ...]:
        """Sort key: the greatest is tried next; of equals, the first."""
        return ()

    def bundle(self) -> tuple[C, ...]:
        """What to try all at once first, where there is no time for each alone; () where there is."""
        return ()

    @abstractmethod
    def measure(self, wanted: Sequence[C], tried: Sequence[C]) -> Measured:
        """Compare what is kept, in alternation, with `wanted`: the same plus `tried`.

        Raises BudgetSpent where it was interrupted for lack of time.
        """

    def after_trial(self, trial: Trial, tried: Sequence[C]) -> None:
        """Called once a trial was measured, before its outcome takes effect."""

    @abstractmethod
    def on_kept(self, wanted: Sequence[C], tried: Sequence[C]) -> None:
        """Called when `wanted` becomes what is kept."""

    def ordered(self, wanted: Sequence[C]) -> list[C]:
        """In the order in which a plan applies them."""
        return list(wanted)

    def after_proposal(self, name: str) -> None:
        """Called when a proposal has been tried."""

    def leaves_time_after(self, trials: int) -> bool:
        """After so many more trials, will there still be time for whatever is expected to save much?"""
        return True

    def leading(self) -> Sequence[str]:
        """Names whose best value is tried before everything else, a bundle too."""
        return ()

    def without(self, choice: C, others: Sequence[C]) -> Comparison | None:
        """Compare all that is kept with all but this choice; None: not tested, or it could not be measured."""
        return None

    def on_dropped(self, choice: C, others: Sequence[C]) -> None:
        """Called when this choice was dropped; `others` are still kept."""

    def needed_seconds(self, wanted: Sequence[C]) -> float:
        """Of a trial that would be in vain if it were interrupted earlier, as where it starts a process."""
        return 0.0

    def predicted(self, tried: Sequence[C]) -> Saving | None:
        """The expected saving; None: unknown."""
        return None

    def close(self) -> None:
        """End the processes of the search."""

    @property
    def total(self) -> int | None:
        """How many steps or items there will be; None: unknown."""
        return None

    @property
    def pairs_of(self) -> str:
        """What is compared, in pairs."""
        return "windows"

    @property
    def usual_trial_seconds(self) -> float:
        """Cost of a trial, where none was made yet."""
        return 1.0

    # the search

    def run(self) -> Record[C]:
        try:
            self.observe()
            leading = self.leading()
            for name in leading:
                self._propose(name, most=1)
            names = self._bundled(list(self.names()))
            self._propose_all([name for name in names if name not in leading], most=1)
            self._propose_all([name for name in self.names() if self._open(name)])
            self._second_look()
            for pair in self._pairs():
                self._try(*pair)
            self._propose_all(self._reopened())
            self._drop_redundant()
        finally:
            self._ended = True
            self.close()
        self._note_where_it_was_busy()
        self.state.enough_seconds = self._enough_seconds()
        return self.state

    def stop(self) -> bool:
        """End `run` soon, with what is kept so far; safe in a signal handler. False if nothing is kept."""
        if not self._ended:
            self.state.stopped_after_seconds = self._deadline.elapsed_seconds
            self._deadline.stopped = True
        return bool(self.state.kept)

    def _bundled(self, names: list[str]) -> list[str]:
        """Try the bundle; returns the names whose best value is left to be tried alone. Most of the gain comes early
        that way, and a budget that runs out still gives a plan; members that add nothing are dropped at once, or in the
        end where that would cost a lever that is expected to save much."""
        bundle = self.bundle()
        members = [name for name in names if any(one in bundle for one in self.proposal(name).candidates)]
        if len(bundle) < 2 or not self._try(*bundle):
            return names
        for name in members:
            self._begun.setdefault(name, set()).update(one.label for one in bundle)
        if self.leaves_time_after(len(bundle)):
            self._drop_redundant()
        return [name for name in names if name not in members]

    def _propose_all(self, names: Sequence[str], most: int | None = None) -> None:
        """most: values per proposal; a second one waits until the best of every other has been tried."""
        untried = list(names)
        while untried:
            offered = [name for name in untried if self._open(name)]
            self._left = len(offered)
            name = max(offered or untried, key=self.promise)
            untried.remove(name)
            self._propose(name, most)
            self.after_proposal(name)
            untried += [one for one in self._reopened() if one not in untried]

    def _propose(self, name: str, most: int | None = None) -> None:
        found, begun = self.proposal(name), self._begun.setdefault(name, set())
        if not found.candidates and not begun:
            self.state.not_tried.append(NotTried(label=found.label, reason=found.reason))
        for candidate in self._open(name)[:most]:
            begun.add(candidate.label)
            self._try(candidate)

    def _open(self, name: str) -> list[C]:
        """What is proposed of it now and was not tried alone."""
        begun = self._begun.get(name, ())
        return [one for one in self.proposal(name).candidates if one.label not in begun]

    def _try(self, *tried: C) -> bool:
        """Try these together on top of what is kept; True if they were kept."""
        label = " + ".join(one.label for one in tried)
        wanted = self.combined(tried)
        if self._remaining() <= self.needed_seconds(wanted):
            self._skip_for_time(tried, label, self._spent())
            return False
        self._progress(f"trying {label}{self._so_far()}")
        began, on_top_of = self._deadline.elapsed_seconds, tuple(one.label for one in self.state.kept)
        predicted = self.predicted(tried)
        try:
            found = self.measure(wanted, tried)
        except BudgetSpent:
            reason = "interrupted when the search was stopped"
            if not self._deadline.stopped:
                reason = f"interrupted: {self._spent()}"
            self._skip_for_time(tried, label, reason)
            return False
        fields = {**vars(found), "exactness": found.exactness or worst(one.exactness for one in tried)}
        trial = Trial(
            **fields,
            label=label,
            choices={name: value for one in tried for name, value in one.choices.items()},
            on_top_of=on_top_of,
            predicted=predicted,
            cost_seconds=self._deadline.elapsed_seconds - began,
            decided_after_seconds=self._deadline.elapsed_seconds,
        )
        if found.outcome == "kept":
            gone = [one for one in self.state.kept if one not in wanted]
            self.state.displaced += [(one, tried) for one in gone]
            self.state.take_back(gone, "dropped", f"{label} took its place")
        self.state.trials.append(trial)
        self._tried.append((trial, tried))
        self.after_trial(trial, tried)
        if found.outcome == "kept":
            self.state.kept = list(wanted)
            self.on_kept(wanted, tried)
        return found.outcome == "kept"

    def combined(self, tried: Sequence[C]) -> list[C]:
        """What is kept, with these; they replace choices of the same fields and those whose work they do."""
        replaced = {name for one in tried for name in (*one.choices, *one.replaces)}
        return self.ordered([*(one for one in self.state.kept if not replaced & {*one.choices}), *tried])

    def _second_look(self) -> None:
        if self._remaining() <= 0:
            return  # values not tried for lack of time would be listed twice
        if self.state.kept:
            self._ask_again()
        for again in self._retries():
            if self._remaining() > 0:
                self._try(*again)

    def _ask_again(self) -> None:
        """What was too small a share of a step to matter may matter now that the step is faster."""
        refused = {entry.label for entry in self.state.not_tried}
        for name in self.names():
            found = self.proposal(name)
            if found.label in refused and found.candidates:
                self.state.not_tried = [entry for entry in self.state.not_tried if entry.label != found.label]
                self._begun.get(name, set()).discard(found.label)  # where one of its values has its name
                self._propose(name)

    def _retries(self) -> list[tuple[C, ...]]:
        """Dropped changes worth a retry, the most promising first: one may help now that others are kept, one that was
        undecided may be decided in the time that is left, and the machine may have been busy."""
        busy, found = self.while_busy(), []
        for trial, tried in self._latest_dropped():
            compared = trial.comparison
            if compared is None:
                continue
            if trial in busy:
                found.append((compared.ratio if trial.predicted is None else trial.predicted.ratios[1], tried))
                continue
            undecided = compared.verdict == "not significant" and compared.ratio > UNDECIDED_FROM
            since = any(one.label not in trial.on_top_of for one in self.state.kept)
            if undecided or (since and compared.ratio > self.worth_beside_others):
                found.append((compared.ratio, tried))
        return [tried for _, tried in sorted(found, key=lambda one: one[0], reverse=True)]

    def _latest_dropped(self) -> list[tuple[Trial, tuple[C, ...]]]:
        """The latest trial of each change that was dropped by itself, and no other value of which is kept."""
        taken = {name for one in self.state.kept for name in one.choices}
        latest = {trial.label: (trial, tried) for trial, tried in self._tried}.values()
        return [
            (trial, tried)
            for trial, tried in latest
            if trial.outcome == "dropped" and len(tried) == 1 and not {*trial.choices} & taken
        ]

    def while_busy(self) -> list[Trial]:
        """The trials during which the machine was busy, see BUSY_FROM."""
        trials = [trial for trial, _ in self._tried]
        return [trial for trial in trials if any(self._busier(trial, other) for other in trials)]

    def _busier(self, trial: Trial, other: Trial) -> bool:
        ours = self.plain_seconds(trial, "low", other.on_top_of)
        theirs = self.plain_seconds(other, "high", trial.on_top_of)
        return ours is not None and theirs is not None and ours > BUSY_FROM * theirs

    def plain_seconds(self, trial: Trial, end: Literal["low", "high"], beside: Collection[str] = ()) -> float | None:
        """Of a step or item during this trial, without the changes that had been kept by then; those with the labels
        `beside` stay. end: of the intervals of their gains. None: it was not timed."""
        if trial.baseline_seconds is None:
            return None
        seconds = trial.baseline_seconds
        for kept, tried in self._tried:
            labels = {one.label for one in tried} & {*trial.on_top_of}
            if kept.outcome == "kept" and kept.comparison is not None and labels and not labels & {*beside}:
                gain = kept.comparison
                seconds *= getattr(gain, end) if gain.has_interval else gain.ratio
        return seconds

    def _note_where_it_was_busy(self) -> None:
        """Say of what was dropped while the machine was busy that this is not known to be right."""
        busy, trials = self.while_busy(), self.state.trials
        unknown = [trial for trial, _ in self._latest_dropped()]
        for number, trial in enumerate(trials):
            if trial in busy and trial.outcome == "dropped":
                again = ", tried again" if any(trial.label == later.label for later in trials[number + 1 :]) else ""
                reason = f"{trial.reason}; the machine was busy then{again}"
                trials[number] = replace(trial, reason=reason, while_busy=trial in unknown)

    def _pairs(self) -> Iterator[tuple[C, ...]]:
        """Pairs that interact, where both were dropped."""
        for one, other in INTERACTING:
            if self._remaining() <= 0:
                return
            first, second = self._best_dropped(one), self._best_dropped(other)
            if first is not None and second is not None:
                yield (*first[1], *second[1])

    def _reopened(self) -> list[str]:
        """Names of proposals with a change to try again: it was dropped before another that it interacts with was
        kept. They are ranked among the others as before, so that this does not wait until all were tried."""
        found = []
        for dropped, kept in [*INTERACTING, *((other, one) for one, other in INTERACTING)]:
            partner = next((one.label for one in self.state.kept if kept in one.choices), None)
            best = self._best_dropped(dropped)
            if partner is None or best is None or (best[0].label, partner) in self._tried_again:
                continue
            self._tried_again.add((best[0].label, partner))
            if any(partner in trial.on_top_of for trial, _ in self._tried if dropped in trial.choices):
                continue
            for name, begun in self._begun.items():
                if best[0].label in begun:
                    begun.discard(best[0].label)
                    found.append(name)
        return found

    def _best_dropped(self, name: str) -> tuple[Trial, tuple[C, ...]] | None:
        """The best value of this field that was measured alone; None where there is none, it was much slower, or a
        value is kept."""
        if any(name in one.choices for one in self.state.kept):
            return None
        measured = [
            (trial, tried)
            for trial, tried in self._tried
            if name in trial.choices and trial.outcome == "dropped" and _ratio(trial) > MUCH_SLOWER and len(tried) == 1
        ]
        return max(measured, key=lambda found: _ratio(found[0]), default=None)

    def _drop_redundant(self) -> None:
        """Test what is kept without each change in turn; drop changes that later ones made redundant."""
        if len(self.state.kept) < 2:
            return
        newest = next((tried for trial, tried in reversed(self._tried) if trial.outcome == "kept"), ())
        known = newest if len(newest) == 1 else ()  # it was tried on top of all the others
        for choice in [one for one in self.state.kept if one not in known]:
            others = [other for other in self.state.kept if other is not choice]
            if self._remaining() <= 0 or not others:
                return
            beside = (choice.label, *sorted(other.label for other in others))
            if beside in self._found_needed:
                continue
            self._progress(f"is {choice.label} still needed?")
            found = self.without(choice, others)
            if found is not None and found.verdict == "faster":
                self.state.displaced.append((choice, self._kept_since(choice, others)))
                reason = f"no longer helps with those kept after it: x{found.ratio:.2f} without it"
                self.state.take_back([choice], "dropped", reason)
                self.state.kept = others
                self.on_dropped(choice, others)
            elif found is not None:
                self._found_needed.add(beside)

    def _kept_since(self, choice: C, others: Sequence[C]) -> tuple[C, ...]:
        """Those that were kept after this one; none where it was never shown to help by itself."""
        alone = [one for one in self.state.trials if one.outcome == "kept" and one.choices == choice.choices]
        return tuple(other for other in others if alone and other.label not in alone[-1].on_top_of)

    # the record

    def judged(self, comparison: Comparison, seconds: tuple[float, float], startup_seconds: float) -> Measured:
        """The verdict, and whether the start-up cost is recovered. seconds: (without the change, with it)."""
        payoff = payoff_steps(startup_seconds, *seconds)
        cost = describe(startup_seconds, payoff, self.total, self.counted)
        faster, paying = comparison.verdict == "faster", pays(payoff, self.total)
        return Measured(
            outcome="kept" if faster and paying else "dropped",
            reason=(cost or "faster") if faster else _why_not_faster(comparison, self.pairs_of),
            baseline_seconds=seconds[0],
            candidate_seconds=seconds[1],
            comparison=comparison,
            startup_seconds=startup_seconds,
            payoff=payoff,
        )

    def _skip_for_time(self, tried: Sequence[C], label: str, reason: str) -> None:
        """Not where it was measured before, nor where its parts are still to be tried by themselves."""
        measured = {trial.label for trial in self.state.trials}
        parts = {one.label for one in tried} if len(tried) > 1 else set()
        if label not in measured and parts <= measured:
            self.state.not_tried.append(NotTried(label=label, reason=reason, for_lack_of_time=True))

    def _remaining(self) -> float:
        return self._deadline.seconds_left

    def _so_far(self) -> str:
        """For the progress line: the time of one step or item at first and now, and the time left."""
        timed = [trial for trial in self.state.trials if trial.baseline_seconds is not None]
        kept, left = [trial for trial in timed if trial.outcome == "kept"], f"{format_seconds(self._remaining())} left"
        first = self.first_seconds or (timed[0].baseline_seconds if timed else None)
        now = kept[-1].candidate_seconds if kept else None
        if first is None or now is None:
            return f" · {left}"
        return f" · {self._a_unit} took {format_seconds(first)}, now {format_seconds(now)} · {left}"

    @property
    def first_seconds(self) -> float | None:
        """Of one step or item before anything was tried; None: as in the first trial."""
        return None

    @property
    def _a_unit(self) -> str:
        unit = self.counted.unit.removesuffix("s")
        return f"an {unit}" if unit[0] in "aeiou" else f"a {unit}"

    def _spent(self) -> str:
        if self._deadline.stopped:
            return "not reached before the search was stopped"
        return f"not reached in the search's share of the budget of {format_seconds(self._deadline.budget_seconds)}"

    def _enough_seconds(self) -> float | None:
        """Estimated from the cost of the trials made, or of a usual one where there was none."""
        open_ones = self.state.late + self.state.dropped_while_busy
        if not open_ones or self._deadline.stopped:
            return None
        costs = [trial.cost_seconds for trial in self.state.trials] or [self.usual_trial_seconds]
        more = open_ones * sum(costs) / len(costs)
        enough = enough_for(self._deadline.elapsed_seconds + more, self._deadline)
        return max(enough, LEAST_MORE * self._deadline.budget_seconds)


@contextlib.contextmanager
def stopped_by_interrupt(stop: Callable[[], bool], progress: Callable[[str], None]) -> Iterator[None]:
    """Within, the first Ctrl-C calls `stop`; if that returns True (something was kept), only the search ends.

    A second one ends everything, as does the first where nothing was kept.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if not stop():
            raise KeyboardInterrupt
        with contextlib.suppress(RuntimeError):  # it came in the middle of another line
            progress(STOPPING)

    with told_of(handle, signal.SIGINT):
        yield


def enough_for(search_seconds: float, deadline: Deadline) -> float:
    """A budget in seconds that gives a search this much time, with the same reserved share as `deadline`."""
    share = 1 - deadline.reserved_seconds / deadline.budget_seconds
    return search_seconds / max(share, SEARCH_SHARE)


def _ratio(trial: Trial) -> float:
    return trial.comparison.ratio if trial.comparison else 0.0


def _why_not_faster(found: Comparison, pairs_of: str) -> str:
    if found.verdict == "slower":
        return "slower"
    if found.ratio < 1:
        return f"not significant: not faster in {found.pairs} pairs of {pairs_of}"
    return f"not significant: {found.reason}"
